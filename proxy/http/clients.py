"""All clients of the data port: makes their connections, ends those that are silent, and closes them when it stops."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.core import open_files
from proxy.core.attempt import Ending
from proxy.core.errors import RequestError
from proxy.core.ports import Clock
from proxy.http.body import Budget
from proxy.http.call import HttpCall
from proxy.http.client import ClientConnection
from proxy.http.hung_up import HungUp, Tell, untold
from proxy.http.request_head import Heads
from proxy.http.settings import Listen
from proxy.http.sweep import look_at

log = logging.getLogger(__name__)

ROOM_INTERVAL = 0.1
"""Seconds between a look for idle connections that found none and the next one: each is a look at all there are."""

Serve = Callable[[HttpCall], Coroutine[Any, Any, None]]
"""Runs as a task of its own, and ends with `ClientConnection.answered`."""

Collects = Callable[[HttpCall, int], bool]
"""Asked on the head of a call: whether its body, of so many bytes, is collected before the call is served. If not, the
call is served at once, with a stream, and may be refused on its head."""

Unserved = Callable[[HttpCall, RequestError | Ending], None]
"""Ends a call that was not served: it could not be read and is to be refused, or its connection ended."""


class Clients:
    """Makes a connection when it is called, as a loop asks of what its server is given."""

    def __init__(
        self,
        serve: Serve,
        collects: Collects,
        unserved: Unserved,
        settings: Listen,
        clock: Clock,
        buffers: Budget,
        hung_up: Tell = untold,
    ) -> None:
        """`buffers` bounds what all connections buffer: see `ClientConnection.count`."""
        self.serve = serve
        self.collects = collects
        self.unserved = unserved
        self.settings = settings
        self.now = clock.now
        self.buffers = buffers
        self.ids = map(f"{os.urandom(8).hex()}%012x".__mod__, itertools.count(1))
        """Of requests that have none."""
        self.connections: set[ClientConnection] = set()
        self._loop = asyncio.get_running_loop()
        self.heads = Heads(self._loop)
        self.hung_up = hung_up
        self._no_room_at = -ROOM_INTERVAL
        self._is_over = False
        self._turned_away = 0
        self._last_file = open_files.limit() - open_files.RESERVED

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._loop)

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended, or begun."""
        return any(connection.call is not None or connection.is_fresh for connection in self.connections)

    def has_room(self, descriptor: int) -> bool:
        """Return whether one connection more, which has this descriptor, may stay. Where there is no room, those that
        have been idle for longest are closed. None comes in after the end: the loop may have accepted it just before.

        The kernel gives out the lowest free descriptor, so a high one means that nearly all are in use. At the limit
        itself uvloop closes new connections without a word."""
        if self._is_over:
            return False
        is_out_of_files = descriptor >= self._last_file
        if len(self.connections) < self.settings.max_connections and not is_out_of_files:
            return True
        now = self.now()
        if now - self._no_room_at >= ROOM_INTERVAL:
            if self._close_longest_idle():
                return True
            self._no_room_at = now
        if is_out_of_files:
            open_files.report(open_files.ACCEPT, now)
            self.hung_up(HungUp.OUT_OF_FILES, 1)
            return False
        self._turned_away += 1
        self.hung_up(HungUp.MAX_CONNECTIONS, 1)
        return False

    def check(self, now: float) -> None:
        """For the sweep: one look at all of them costs less than a timer for each."""
        look_at(self.connections, now, ClientConnection.broke)
        if self._turned_away:
            limit, turned_away, self._turned_away = self.settings.max_connections, self._turned_away, 0
            log.warning("hung up on %d clients: listen.maxConnections (%d) are connected", turned_away, limit)

    def close_idle(self) -> None:
        """Closes the connections that are between requests; those whose first one is to come are given a moment."""
        for connection in tuple(self.connections):
            if connection.idle and not connection.is_fresh:
                connection.close()

    async def shutdown(self, timeout: float) -> None:
        """Requests have `timeout` seconds to end, and as many again once they are cancelled."""
        self._is_over = True
        for cancel in (False, True):
            running = [connection.task for connection in self.connections if connection.task is not None]
            if cancel:
                for task in running:
                    task.cancel()
            if running:
                await asyncio.wait(running, timeout=timeout)
        for connection in tuple(self.connections):
            connection.close()

    def _close_longest_idle(self) -> bool:
        """Those that the sweep has not seen idle yet are so for a shorter time than the others. They count no more at
        once: the loop tells of their end only later, and whoever comes until then would have as many closed again."""
        idle = [each for each in self.connections if each.makes_room]
        idle.sort(key=lambda each: math.inf if each.idle_since is None else each.idle_since)
        for each in idle[: 1 + self.settings.max_connections // 20]:
            self.connections.discard(each)
            each.close()
        return bool(idle)
