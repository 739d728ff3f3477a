"""All clients of the data port: makes their connections, ends those that are silent, and closes them when it stops."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.core.errors import RequestError
from proxy.core.exchange import Ending
from proxy.core.ports import Clock
from proxy.http.call import HttpCall
from proxy.http.client import ClientConnection
from proxy.http.settings import Listen
from proxy.http.sweep import look_at

Serve = Callable[[HttpCall], Coroutine[Any, Any, None]]
"""Runs as a task of its own, and ends with `ClientConnection.answered`."""

Collects = Callable[[HttpCall, int], bool]
"""Asked on the head of a call: whether its body, of so many bytes, is collected before the call is served. If not, the
call is served at once, with a stream, and may be refused on its head."""

Unserved = Callable[[HttpCall, RequestError | Ending], None]
"""Ends a call that was not served: it could not be read and is to be refused, or its connection ended."""


class Clients:
    """Makes a connection when it is called, as a loop asks of what its server is given."""

    def __init__(self, serve: Serve, collects: Collects, unserved: Unserved, settings: Listen, clock: Clock) -> None:
        self.serve = serve
        self.collects = collects
        self.unserved = unserved
        self.settings = settings
        self.now = clock.now
        self.ids = map(f"{os.urandom(8).hex()}{{:012x}}".format, itertools.count(1))
        """Of requests that have none."""
        self.connections: set[ClientConnection] = set()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._loop)

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return any(connection.call is not None for connection in self.connections)

    def check(self, now: float) -> None:
        """For the sweep: one look at all of them costs less than a timer for each."""
        look_at(self.connections, now)

    def close_idle(self) -> None:
        """Closes the connections that are between requests."""
        for connection in tuple(self.connections):
            if connection.idle:
                connection.close()

    async def shutdown(self, timeout: float) -> None:
        """Requests have `timeout` seconds to end, and as many again once they are cancelled."""
        for cancel in (False, True):
            running = [connection.task for connection in self.connections if connection.task is not None]
            if cancel:
                for task in running:
                    task.cancel()
            if running:
                await asyncio.wait(running, timeout=timeout)
        for connection in tuple(self.connections):
            connection.close()
