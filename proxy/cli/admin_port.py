"""Asks the admin port of a proxy that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import click
import orjson

TIMEOUT = aiohttp.ClientTimeout(total=30.0)

KEY_VARIABLE = "KVLANE_ADMIN_KEY"


def asked(url: str, path: str, key: str, query: Mapping[str, str], body: bytes | None = None) -> Any:
    """The JSON of the answer; a body is posted. What is no good answer ends the command with what it says."""
    try:
        return asyncio.run(_asked(url.rstrip("/") + path, key, query, body))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        said = str(error) or type(error).__name__
        click.echo(f"{url}: {said}; is this the admin port, 9190 unless configured?", err=True)
        raise SystemExit(2) from None


async def _asked(url: str, key: str, query: Mapping[str, str], body: bytes | None) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session,
        session.request("GET" if body is None else "POST", url, params=dict(query), data=body) as answer,
    ):
        said = orjson.loads(await answer.read())
    if answer.status >= 400:
        click.echo(_refusal(answer.status, said), err=True)
        raise SystemExit(2)
    return said


def _refusal(status: int, said: Any) -> str:
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    hint = f" Give the key with --key, or in {KEY_VARIABLE}." if status in (401, 403) else ""
    return f"{message or f'the admin port answered {status}'}{hint}"
