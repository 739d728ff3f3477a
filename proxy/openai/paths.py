"""What the target of a request says besides which API is called."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import parse_qs

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
    """The model that a query names: `/v1/realtime?model=…` has no body to name one."""
    return parse_qs(query.removeprefix("?")).get("model", [None])[0]
