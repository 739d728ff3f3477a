"""JSON out of and into the admin port."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from proxy.core.errors import InvalidJson


def json_answer(value: Any, status: int = 200) -> web.Response:
    """Indented, for people with curl."""
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    return web.Response(status=status, body=body, content_type="application/json")


async def json_body(request: web.Request) -> Any:
    """Raises InvalidJson."""
    body = await request.read()
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = f"is not valid JSON: {error}" if body else "is empty"
        raise InvalidJson(f"The request body {what}.") from None
