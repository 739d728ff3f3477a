"""A proxy in this process, pods in front of it, and one connection to a port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from proxy.app import App
from proxy.settings import from_mapping

PATIENCE = 5.0
"""Seconds after which one input counts as a hang."""

GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
STREAMED = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'


def settings_before(pod: asyncio.Server, served: Sequence[str] = ("m",), **more: Any) -> dict[str, Any]:
    port = pod.sockets[0].getsockname()[1]
    reliability = {
        "timeouts": {"firstByte": "1s", "idle": "1s", "request": "2s"},
        "retries": {"attempts": 1},
        "breaker": {"failures": 1_000_000, "panicPercent": 0},
    }
    return {
        "listen": {"host": "127.0.0.1", "port": 0, "headTimeout": "1s", "bodyTimeout": "1s"},
        "admin": {"port": 0},
        "pods": {
            "static": [{"url": f"http://127.0.0.1:{port}", "models": list(served)}],
            "refresh": {"interval": "60s"},
        },
        **more,
        "reliability": {**reliability, **more.get("reliability", {})},
        "telemetry": {"accessLog": False, **more.get("telemetry", {})},
    }


@asynccontextmanager
async def proxy_before(pod: asyncio.Server, **more: Any) -> AsyncIterator[App]:
    """`more`: models of the pod as `served`, and sections of the configuration."""
    async with App(from_mapping(settings_before(pod, **more))) as app:
        yield app


async def exchange(port: int, pieces: Sequence[bytes], quiet: float = PATIENCE) -> bytes | None:
    """Return what is received until the other side closes the connection, None if it does not. After `quiet` seconds
    without data the sender closes its half."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    response = b""
    try:
        async with asyncio.timeout(PATIENCE):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                while data := await asyncio.wait_for(reader.read(65536), quiet):
                    response += data
                return response
            writer.write_eof()
            return response + await reader.read()
    except TimeoutError:
        return None
    except (ConnectionError, OSError):
        return b""
    finally:
        writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, Mapping[str, str], bytes]:
    """Return the request line, the headers in lower case and the body. Raise ValueError for what is no request, and
    as a StreamReader does."""
    line, *fields = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = {}
    for one in fields:
        name, _, value = one.partition(b":")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    if headers.get("transfer-encoding"):
        pieces = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return line, headers, b"".join(pieces)
    return line, headers, await reader.readexactly(int(headers.get("content-length", "0")))


async def respond_well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A pod; it hangs up on a request that it cannot read."""
    try:
        while True:
            await read_request(reader)
            writer.write(GOOD)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        pass
    finally:
        writer.close()
