"""The smallest question that an engine must work for: one token."""

from __future__ import annotations

import asyncio

import orjson

from proxy.core.endpoint import Endpoint
from proxy.core.errors import OutOfFiles, UpstreamFailed
from proxy.core.ports import Poster

PATH = "/v1/completions"


async def generates(endpoint: Endpoint, poster: Poster, timeout: float) -> bool | None:
    """Whether the engine generates a token within so many seconds; None if it says that it does not take such
    requests, or names no model to ask for. Raises OutOfFiles, which says nothing of the engine."""
    models = (endpoint.models or frozenset()) - endpoint.adapters
    if not models:
        return None
    body = orjson.dumps({"model": min(models), "prompt": "1", "max_tokens": 1, "temperature": 0})
    try:
        async with asyncio.timeout(timeout):
            status, _ = await poster.post(endpoint.url + PATH, body, endpoint.api_key)
    except OutOfFiles:
        raise
    except (UpstreamFailed, TimeoutError):
        return False
    return None if 400 <= status < 500 else status == 200
