"""What the target of a request says besides which API is called."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import parse_qsl

from proxy.core.errors import BadRequest

_STORED = "/v1/responses/"
_STORED_RESPONSE = re.compile(rf"{_STORED}([^/]+)")


@lru_cache(maxsize=64)
def response_id(path: str) -> str | None:
    """The stored response that a path is about."""
    if not path.startswith(_STORED):
        return None
    found = _STORED_RESPONSE.match(path)
    return found[1] if found and found[1] != "render" else None


def model_in(query: str) -> str | None:
    """The model that a query names: `/v1/realtime?model=…` has no body to name one. Raises BadRequest if it names
    several, because servers differ in which one counts."""
    if "model" not in query and "%" not in query:
        return None
    named = [value for name, value in parse_qsl(query.removeprefix("?"), keep_blank_values=True) if name == "model"]
    if len(named) > 1:
        raise BadRequest("The query has more than one 'model'; send one.", param="model")
    return named[0] if named else None
