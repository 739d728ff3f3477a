"""Paths that say more than which API is called."""

from __future__ import annotations

import re

_STORED_RESPONSE = re.compile(r"/v1/responses/([^/]+)")


def response_id(path: str) -> str | None:
    """The stored response that a path is about."""
    found = _STORED_RESPONSE.match(path)
    return found[1] if found and found[1] != "render" else None
