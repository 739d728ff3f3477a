"""The data port: takes requests of clients, hands those for pods to the gateway and answers the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import RequestError
from proxy.core.listener import Listeners
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.http.answer import Answer, Rim
from proxy.http.body import BodyReader, Budget
from proxy.http.call import HttpCall
from proxy.http.clients import Clients
from proxy.http.cors import Cors
from proxy.http.entrance import Door
from proxy.http.handshakes import Handshakes
from proxy.http.hung_up import HungUp, Tell, untold
from proxy.http.listening import listeners, port_of
from proxy.http.race import Race
from proxy.http.relay import ClientRelay
from proxy.http.service import Bodies, C, Gateway, Service
from proxy.http.settings import Listen, Security
from proxy.http.sweep import Sweep
from proxy.http.tls import server_context
from proxy.http.upstream.pool import UpstreamPool
from proxy.reliability.settings import Timeouts

TURNS = 3
"""Of the loop, in which what it has accepted becomes a connection, to be served as others are when the port closes."""


@dataclass(frozen=True, slots=True)
class Served:
    """How requests are served under one configuration.

    `takes`, `given_up` and `continued`: see `Rim`. Without a door no credentials are asked for.
    """

    gateway: Gateway
    security: Security
    timeouts: Timeouts
    listeners: Listeners
    takes: Callable[[Attempt, int], bool]
    given_up: Callable[[Attempt, float], str] = lambda attempt, heard_at: ""
    door: Door | None = None
    continued: Sequence[str] = ()


class DataServer:
    """Listens between `start` and `stop`."""

    def __init__(
        self,
        settings: Listen,
        served: Served,
        clock: Clock,
        pool: UpstreamPool,
        hung_up: Tell = untold,
    ) -> None:
        """`pool` has the connections to pods; it is closed with the server."""
        self._settings = settings
        self._clock = clock
        self._served = served
        self._cors = served.security.cors
        self._sweep = Sweep(clock, self._shortest(served.timeouts))
        self.pool = pool
        self._bodies = BodyReader(settings, self._sweep)
        self._hung_up = hung_up
        self.service: Service[HttpCall] = self.service_of(self._bodies, hung_up)
        self._rim: Rim
        self._tasks = Tasks()
        self._clients: Clients
        self._listeners: list[asyncio.Server]

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """On `sockets`, which are bound; else on the port of the settings. Raises OSError if it cannot be had, or the
        certificate cannot."""
        settings = self._settings
        serve = Cors(self._cors.origins, self._serve, self._permitted).serve if self._cors.origins else self._serve
        buffers = self._bodies.buffers
        self._clients = Clients(serve, self._collects, self._unserved, settings, self._clock, buffers, self._hung_up)
        self._sweep.watched.add(self._clients)
        accept: Callable[[], asyncio.Protocol] = self._clients
        self._make_rim()
        context = None
        if settings.tls is not None:
            context = server_context(settings.tls)
            accept = handshakes = Handshakes(accept, partial(self._hung_up, HungUp.TLS_HANDSHAKE))
            self._sweep.watched.add(handshakes)
        self._listeners = await listeners(accept, settings.host, settings.port, sockets, context)
        self._tasks.keep(self._sweep.run, "stall-sweep")
        self._tasks.keep(self._reap, "idle-connections")

    @property
    def port(self) -> int:
        return port_of(self._listeners)

    @property
    def rim(self) -> Rim:
        """That of requests which come now."""
        return self._rim

    @property
    def budget(self) -> Budget:
        """Of request bodies, wherever they come in."""
        return self._bodies.budget

    @property
    def retained(self) -> int:
        """Bytes of request bodies, heads and pipelined requests in memory that count against
        `listen.retainedBodies`."""
        return self._bodies.budget.used + self._bodies.buffers.used

    @property
    def served(self) -> Served:
        """Replaced as a whole: new requests follow, running ones go on as they began. CORS stays as it was."""
        return self._served

    @served.setter
    def served(self, served: Served) -> None:
        self._served = served
        is_stopping, self.service = self.service.stopping, self.service_of(self._bodies, self._hung_up)
        self.service.stopping = is_stopping
        self._sweep.shortest = self._shortest(served.timeouts)
        self.pool.connect_timeout = served.timeouts.connect
        self._make_rim()

    def service_of(self, bodies: Bodies[C], hung_up: Tell = untold) -> Service[C]:
        """Return what serves the requests of a port whose bodies these are."""
        served = self._served
        return Service(served.gateway, served.security, served.door, bodies, served.listeners, hung_up)

    def settle(self) -> None:
        """What comes is served, and told not to come again: connections close after their answers."""
        self.service.stopping = True

    async def stop(self, grace: float) -> None:
        """No new connections; requests in flight have `grace` seconds to end, then they are cut, or refused
        if nothing was answered."""
        self.service.stopping = True
        for listener in self._listeners:
            listener.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        end = asyncio.get_running_loop().time() + grace
        while self._clients.busy and asyncio.get_running_loop().time() < end:
            self._clients.close_idle()
            await asyncio.sleep(0.02)
        self._evict()
        await asyncio.sleep(0)
        await self._clients.shutdown(0.1)
        await self._tasks.stop()
        self.pool.close()

    def _shortest(self, timeouts: Timeouts) -> float:
        listen = self._settings
        ours = (listen.body_timeout, listen.head_timeout, listen.keep_alive, listen.send_timeout)
        return min(timeouts.first_byte, timeouts.idle, timeouts.request, *ours)

    def _make_rim(self) -> None:
        loop, served = asyncio.get_running_loop(), self._served
        told = (served.takes, served.given_up, served.continued)
        self._rim = Rim(self.pool, served.timeouts, self._clock, loop, *told)

    def _collects(self, call: HttpCall, size: int) -> bool:
        """What is refused on its head, or answered here, does not wait for its body."""
        return self.service.wants(call) and self._bodies.collects(call, size)

    def _serve(self, call: HttpCall) -> Coroutine[Any, Any, None]:
        return self.service.serve(call, ClientRelay(call, self._rim))

    def _unserved(self, call: HttpCall, why: RequestError | Ending) -> None:
        self.service.unserved(call, why)

    def _permitted(self, call: HttpCall) -> None:
        """What was answered in the place of `_serve`."""
        self.service.ended(call, Ending.COMPLETE, None)
        call.end()

    def _evict(self) -> None:
        """Closing their connections would make some answers look whole. All at once, so that nobody who waits gets the
        room that others leave."""
        for connection in tuple(self._clients.connections):
            if isinstance(connection.sink, Answer | Race):
                connection.sink.evict()
            elif connection.sink is None:
                connection.evict()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.pool.reap()
