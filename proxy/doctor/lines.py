"""What only a connection of one's own shows: when a pod hangs up, and whether somebody publishes on a port."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from proxy.core.ports import Clock

ZMTP = b"\xff", b"\x7f"
"""How the first ten bytes of a peer begin and end (ZMTP 3.1, section 3.1)."""


async def keep_alive(url: str, patience: float, clock: Clock) -> float | None:
    """Seconds until an idle connection is closed; infinite if that takes longer than `patience`, 0 if it is closed
    after the answer, None if there is no answer."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    ask = f"GET {parts.path}/health HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode()
    try:
        async with _connected(parts.hostname or "", port, patience, is_tls) as (reader, writer):
            writer.write(ask)
            async with asyncio.timeout(patience):
                head = await reader.readuntil(b"\r\n\r\n")
            if b"connection: close" in head.lower():
                return 0.0
            begun = clock.now()
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await reader.read()
                return clock.now() - begun
            return math.inf
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


async def speaks_zmtp(host: str, port: int, patience: float) -> bool:
    """Whether a ZeroMQ socket is bound there."""
    try:
        async with _connected(host, port, patience) as (reader, writer):
            writer.write(ZMTP[0] + bytes(8) + ZMTP[1])
            async with asyncio.timeout(patience):
                greeting = await reader.readexactly(10)
            return (greeting[:1], greeting[-1:]) == ZMTP
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


@asynccontextmanager
async def _connected(
    host: str, port: int, patience: float, is_tls: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(host, port, ssl=is_tls or None)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
