"""One connection between a worker and the hub: whole frames, and a bound on what waits for a slow reader."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from proxy.core.ports import Tally
from proxy.replicas.wire import EVERYBODY, Frames, Garbled, frame

log = logging.getLogger(__name__)

BACKLOG = 8 * 1024 * 1024
"""Bytes that wait for a reader who is slow; beyond it the oldest frames are dropped."""

_BUFFER = 256 * 1024


class Link(asyncio.Protocol):
    """`received(address, records)` for every frame, `lost()` once when the other side is gone, `missed()` when the
    reader has caught up after frames were dropped: only a snapshot helps then."""

    def __init__(
        self,
        received: Callable[[int, bytes], None],
        lost: Callable[[], None],
        missed: Callable[[], None],
        dropped: Tally,
        backlog: int = BACKLOG,
    ) -> None:
        self._received = received
        self._lost = lost
        self._missed = missed
        self._dropped = dropped
        self._backlog = backlog
        self._frames = Frames()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._gap = False
        self._is_over = False
        """Nothing more is said."""
        self._transport: asyncio.Transport
        self.closed = asyncio.Event()

    @classmethod
    async def over(cls, sock: socket.socket, *arguments: object) -> Link:
        """A link over a connected socket; the arguments are those of the class."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(*arguments), sock=sock)  # type: ignore[arg-type]
        return link

    def tell(self, records: bytes) -> None:
        self.send(EVERYBODY, records)

    def send(self, address: int, records: bytes) -> None:
        """Never waits."""
        data = frame(address, records)
        if not self._paused:
            self._transport.write(data)
            return
        if self._is_over:
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > self._backlog:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._dropped.add(1)
            self._gap = True

    def close(self) -> None:
        """What was said goes out, and the other side hangs up when it has heard it; wait for `closed`. If this side
        did, what the other one writes just then would fail there, before it has read the rest."""
        if self._is_over:
            return
        self._is_over = self._paused = True
        self._transport.writelines(self._waiting)
        self._waiting.clear()
        self._transport.write_eof()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER)

    def data_received(self, data: bytes) -> None:
        try:
            for address, records in self._frames.feed(data):
                self._received(address, records)
        except Garbled as error:
            log.error("the bus is garbled, its link is cut: %s", error)
            self.abort()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        if self._is_over:
            return
        self._paused = False
        while self._waiting and not self._paused:
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._transport.write(data)
        if self._gap and not self._waiting:
            self._gap = False
            self._missed()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = self._paused = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self.closed.set()
        self._lost()
