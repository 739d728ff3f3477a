"""Takes connections of gateways, and passes bytes between them and gRPC's own server on a unix socket.

That server takes no sockets that others hold, and it stops as a whole: streams that a gateway had opened by then, not
knowing, are refused, and the gateway answers its client with 500 (measured with Envoy and four clients: one request at
every sixth change of workers). Here a gateway is told first, and served until it has gone elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import cast

from proxy.core.tasks import Tasks
from proxy.extproc.messages import GO_AWAY, Frames
from proxy.http.server import listeners, port_of
from proxy.http.settings import ServerTls
from proxy.http.tls import server_context

QUIET = 1.0
"""Seconds without a request after which a gateway has heard, or says nothing anyway."""

LOOK = 0.02
"""Seconds."""


class Front:
    """Listens between `start` and `leave`; ends with `close`."""

    def __init__(self, path: str) -> None:
        """Of gRPC's socket."""
        self.path = path
        self.tasks = Tasks()
        self.open: set[Gateway] = set()
        self._listeners: list[asyncio.Server] = []

    async def start(self, host: str, port: int, tls: ServerTls | None, sockets: Sequence[socket.socket] = ()) -> None:
        """On `sockets`, which are bound; else there. Raises OSError if the port cannot be had, or the certificate."""
        context = None if tls is None else server_context(tls, ("h2",))
        self._listeners = await listeners(self._gateway, host, port, sockets, context)

    @property
    def port(self) -> int:
        return port_of(self._listeners)

    async def leave(self, grace: float, is_busy: Callable[[], bool]) -> None:
        """Nobody new is let in, and who is in is asked to go. Until all have, or have nothing to say, or the time is
        over."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.close()
        heard, end = loop.time(), loop.time() + grace
        while loop.time() < end and (is_busy() or loop.time() < heard + QUIET):
            for gateway in self.open:  # also those that were accepted, and had not begun
                gateway.ask_to_go()
            await asyncio.sleep(LOOK)
            if not self.open:
                return
            if is_busy():
                heard = loop.time()

    async def close(self) -> None:
        for gateway in tuple(self.open):
            gateway.close()
        await self.tasks.stop()

    def _gateway(self) -> Gateway:
        return Gateway(self)


class End(asyncio.Protocol):
    """One of two: what comes here goes out at the other, which says when it cannot take more."""

    other: End | None = None
    _transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """After what was written."""
        if self._transport is not None:
            self._transport.close()


class Gateway(End):
    """A gateway's end."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._early = bytearray()
        """Until there is the other end. Not left unread: uvloop reads what was paused before it began."""
        self._frames = Frames()
        self._asked = self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._front.open.add(self)
        self._front.tasks.start(self._connect(), "connection of a gateway")

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._front.open.discard(self)

    def ask_to_go(self) -> None:
        """As soon as a frame has ended."""
        self._asked = True
        if not self._told and self._frames.is_between:
            self._tell()

    def write(self, data: bytes) -> None:
        if not self._told:
            at = self._frames.passed(data, self._asked)
            super().write(data[:at])
            data = data[at:]
            if self._asked and self._frames.is_between:
                self._tell()
        if data:
            super().write(data)

    def _tell(self) -> None:
        self._told = True
        super().write(GO_AWAY)

    async def _connect(self) -> None:
        inner = End()
        inner.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: inner, self._front.path)
        except OSError:
            self.close()
            return
        self.other = inner
        inner.write(bytes(self._early))
        if self._transport is None:
            inner.close()
