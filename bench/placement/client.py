"""Send a streamed request over its own connection, and note the times of the response."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import cast

TAIL = 4096
"""Bytes that are kept of a response's end: the usage is in them."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_POD = re.compile(rb"\r\nx-kvlane-endpoint: *([^\r]+)", re.IGNORECASE)
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')


@dataclass(slots=True)
class StreamResult:
    """Times are in seconds of the event loop, None for missing events; `pod` is what the router reports."""

    sent: float = 0.0
    status: int = 0
    pod: str = ""
    first: float | None = None
    last: float | None = None
    tail: bytes = field(default=b"", repr=False)

    @property
    def whole(self) -> bool:
        return self.status == 200 and b"data: [DONE]" in self.tail

    @property
    def cached_tokens(self) -> int | None:
        found = _CACHED.findall(self.tail)
        return int(found[-1]) if found else None


async def ask(port: int, path: str, body: bytes, session: str = "") -> StreamResult:
    """Never raise for faults of the other side: an incomplete response shows how far it came. `session` is what
    the client calls its conversation."""
    loop = asyncio.get_running_loop()
    exchange = _ResultReader(loop, _request(path, body, session))
    try:
        await loop.create_connection(lambda: exchange, "127.0.0.1", port)
    except OSError:
        return exchange.result
    try:
        return await exchange.done
    finally:
        exchange.transport.abort()


def _request(path: str, body: bytes, session: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head += f"x-session-id: {session}\r\n" if session else ""
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class _ResultReader(asyncio.Protocol):
    """Bytes of the response are read once; the first event of the stream is the first token."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, request: bytes) -> None:
        self.result = StreamResult()
        self.done: asyncio.Future[StreamResult] = loop.create_future()
        self._now = loop.time
        self._request = request
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own are no subclasses of it
        self.result.sent = self._now()
        transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        result = self.result
        if not result.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._read_head(head)
        if not data:
            return
        result.last = self._now()
        if result.first is None and b"data:" in data:
            result.first = result.last
        result.tail = (result.tail + data)[-TAIL:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self.result)

    def _read_head(self, head: bytes) -> None:
        status, pod = _STATUS.match(head), _POD.search(head)
        self.result.status = int(status[1]) if status else -1
        self.result.pod = pod[1].decode() if pod else ""
