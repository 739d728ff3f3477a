"""Clients that are to speak TLS, until they have got through their handshake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast
from weakref import WeakSet

from proxy.http.guarded import guarded

log = logging.getLogger(__name__)


class Handshake(asyncio.Protocol):
    """Stands where a connection will be. One that fails goes as it came, and nothing else has been made for it."""

    __slots__ = ("__weakref__", "_handshakes", "_transport")

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    @guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = self._handshakes.succeeded(self)
        self._transport.set_protocol(connection)
        connection.connection_made(transport)

    def broke(self, error: Exception) -> None:
        log.error("failed to accept a client after its TLS handshake; closed its connection", exc_info=error)
        self._transport.abort()


class Handshakes:
    """Called by a loop for each client. It tells nobody of a handshake that failed: that is one which was begun, is no
    more, and has come to no connection. uvloop lets go of it at once; asyncio leaves it to the garbage collection."""

    def __init__(self, connect: Callable[[], asyncio.Protocol], failed: Callable[[int], None]) -> None:
        """`failed` is told how many did since the last look."""
        self._connect = connect
        self._failed = failed
        self._open: WeakSet[Handshake] = WeakSet()
        self._begun = 0
        """Those that have succeeded or were told of aside."""

    def __call__(self) -> Handshake:
        handshake = Handshake(self)
        self._open.add(handshake)
        self._begun += 1
        return handshake

    def succeeded(self, handshake: Handshake) -> asyncio.Protocol:
        self._open.discard(handshake)
        self._begun -= 1
        return self._connect()

    def check(self, now: float) -> None:
        """For the sweep."""
        if failed := self._begun - len(self._open):
            self._begun -= failed
            self._failed(failed)
