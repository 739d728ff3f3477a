"""Clients that are to speak TLS, until they have got through their handshake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from weakref import WeakSet


class Handshake(asyncio.Protocol):
    """Stands where a connection will be. One that fails goes as it came, and nothing else has been made for it."""

    __slots__ = ("__weakref__", "_handshakes")

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = self._handshakes.succeeded(self)
        cast(asyncio.Transport, transport).set_protocol(connection)
        connection.connection_made(transport)


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
