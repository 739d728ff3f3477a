"""The data port: accept connections, pass requests for pods to the gateway and respond to the others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import RequestError
from proxy.core.files import CANNOT_ACCEPT, RESERVED_FILES, open_files_limit, report_out_of_files
from proxy.core.listener import Listeners
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.http.body import BodyReader, MemoryBudget
from proxy.http.client_connection import ClientConnection
from proxy.http.guards import CloseReason, CountClosed, Sweep, check_all, count_nothing, guarded
from proxy.http.relay import ClientRelay, ResponseRace
from proxy.http.request import Heads, HttpRequest
from proxy.http.response import RelayContext, Response
from proxy.http.service import Bodies, C, Cors, Service
from proxy.http.settings import HANDSHAKE_TIMEOUT, ListenSettings, SecuritySettings, server_context
from proxy.http.upstream.pool import UpstreamPool
from proxy.reliability.settings import Timeouts

if TYPE_CHECKING:
    from proxy.auth.authenticator import Authenticator
    from proxy.gateway import Gateway

log = logging.getLogger(__name__)


BACKLOG = 1024


async def listen_on(
    accept: Callable[[], asyncio.BaseProtocol],
    host: str,
    port: int,
    sockets: Sequence[socket.socket],
    tls: ssl.SSLContext | None,
) -> list[asyncio.Server]:
    """Return listening sockets: the given bound `sockets`, or new ones on the port. Raise OSError if the port is
    unavailable."""
    listen = partial(
        asyncio.get_running_loop().create_server,
        accept,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT,
    )
    return [await listen(sock=sock) for sock in sockets] if sockets else [await listen(host, port)]


def port_of(listening: Sequence[asyncio.Server]) -> int:
    """Return the port that all of them share."""
    port: int = listening[0].sockets[0].getsockname()[1]
    return port


class Handshake(asyncio.Protocol):
    """The protocol of a connection during the TLS handshake. A failed handshake leaves nothing behind."""

    __slots__ = ("__weakref__", "_handshakes", "_transport")

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    @guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = self._handshakes.succeeded(self)
        self._transport.set_protocol(connection)
        connection.connection_made(transport)

    def internal_error(self, error: Exception) -> None:
        log.error("failed to accept a client after its TLS handshake; closed its connection", exc_info=error)
        self._transport.abort()


class Handshakes:
    """Creates the protocol of each client for the event loop. The loop does not report a failed handshake: it is one
    that was started, is gone, and led to no connection. uvloop frees it at once; asyncio leaves it to garbage
    collection."""

    def __init__(self, server: DataServer) -> None:
        self._server = server
        self._open: WeakSet[Handshake] = WeakSet()
        self._begun = 0
        """Handshakes begun that have neither succeeded nor been reported as failed."""

    def __call__(self) -> Handshake:
        handshake = Handshake(self)
        self._open.add(handshake)
        self._begun += 1
        return handshake

    def succeeded(self, handshake: Handshake) -> asyncio.BaseProtocol:
        self._open.discard(handshake)
        self._begun -= 1
        return self._server.connect()

    def check(self, now: float) -> None:
        """Count failed handshakes; called by the sweep."""
        if failed := self._begun - len(self._open):
            self._begun -= failed
            self._server.count_closed(CloseReason.TLS_HANDSHAKE, failed)


READ_SIZE = 256 * 1024
"""Bytes that are read from a client at once."""

IDLE_SEARCH_INTERVAL = 0.1
"""Seconds between two searches for idle connections after one that found none, because each search looks at all
connections."""


REAP_INTERVAL = 1.0
"""Seconds between two searches for connections to pods that were idle for too long."""

TURNS = 3
"""Turns of the loop in which accepted sockets become connections, which are served although the port closes."""


@dataclass(frozen=True, slots=True)
class DataPortConfig:
    """What one configuration sets for the data port. Without an authenticator no keys are required."""

    gateway: Gateway
    security: SecuritySettings
    timeouts: Timeouts
    listeners: Listeners
    retries_instead: Callable[[Attempt, int], bool]
    """Return whether to retry on another pod instead of relaying a response of this status."""
    reason_to_give_up: Callable[[Attempt, float], str] = lambda attempt, silent_since: ""
    """Return why to give up a response that has sent nothing since this time in monotonic seconds; empty to keep
    waiting."""
    authenticator: Authenticator | None = None
    continuable_models: Sequence[str] = ()
    """Patterns of models whose responses another pod can continue."""


class DataServer:
    """The data port: its connections and the service of their requests. It listens between `start` and `stop`."""

    def __init__(
        self,
        settings: ListenSettings,
        config: DataPortConfig,
        clock: Clock,
        upstream: UpstreamPool,
        count_closed: CountClosed = count_nothing,
    ) -> None:
        """`upstream` has the connections to pods; it is closed with the server."""
        self.settings = settings
        self.now = clock.now
        self._clock = clock
        self._sweep = Sweep(clock, math.inf)
        self._sweep.watched.add(self)
        self._bodies = BodyReader(settings, self._sweep)
        self.buffers = self._bodies.buffers
        """Limits the buffers of all connections; see `ClientConnection.count`."""
        self.upstream = upstream
        self.ids = map(f"{os.urandom(8).hex()}%012x".__mod__, itertools.count(1))
        """Ids for requests without one."""
        self.connections: set[ClientConnection] = set()
        self.buffer = memoryview(bytearray(READ_SIZE))
        self._loop = asyncio.get_running_loop()
        self.heads = Heads(self._loop)
        self.count_closed = count_closed
        self._no_idle_at = -IDLE_SEARCH_INTERVAL
        self._is_over = False
        self._turned_away = 0
        self._last_file = open_files_limit() - RESERVED_FILES
        self.config = config
        self.service: Service[HttpRequest] = self.service_of(self._bodies, count_closed)
        self.context: RelayContext
        """What the relays of new requests share."""
        self.use(config)
        origins = config.security.cors.origins
        self.serve = Cors(origins, self._serve, self._end_preflight).serve if origins else self._serve
        """Runs as a task and ends with `ClientConnection.request_ended`."""
        self._tasks = Tasks()
        self._port_servers: list[asyncio.Server]

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen on the bound `sockets`, else on the port of the settings. Raise OSError if the port or the certificate
        is unavailable."""
        settings, tls = self.settings, None
        accept: Callable[[], asyncio.BaseProtocol] = self.connect
        if settings.tls is not None:
            tls = server_context(settings.tls, "listen.tls")
            accept = handshakes = Handshakes(self)
            self._sweep.watched.add(handshakes)
        self._port_servers = await listen_on(accept, settings.host, settings.port, sockets, tls)
        self._tasks.keep(self._sweep.run, "stall-sweep")
        self._tasks.keep(partial(self.upstream.keep_reaping, REAP_INTERVAL), "idle-connections")

    @property
    def port(self) -> int:
        return port_of(self._port_servers)

    @property
    def budget(self) -> MemoryBudget:
        """The memory budget of request bodies on all ports."""
        return self._bodies.budget

    @property
    def retained(self) -> int:
        """Bytes of request bodies, heads and pipelined requests that count against `listen.retainedBodies`."""
        return self._bodies.budget.used + self._bodies.buffers.used

    def use(self, config: DataPortConfig) -> None:
        """Serve new requests under this configuration; running ones keep theirs. CORS does not change."""
        self.config = config
        is_stopping, self.service = self.service.stopping, self.service_of(self._bodies, self.count_closed)
        self.service.stopping = is_stopping
        timeouts, listen = config.timeouts, self.settings
        ours = (listen.body_timeout, listen.head_timeout, listen.keep_alive, listen.send_timeout)
        self._sweep.shortest = min(timeouts.first_byte, timeouts.idle, timeouts.request, *ours)
        self.upstream.connect_timeout = timeouts.connect
        self.context = RelayContext(self.upstream, self._clock, self._loop, config)

    def service_of(self, bodies: Bodies[C], count_closed: CountClosed = count_nothing) -> Service[C]:
        """Return the service of a port with these bodies."""
        return Service(self.config, bodies, count_closed)

    def connect(self) -> ClientConnection:
        """Return the protocol of an accepted connection."""
        return ClientConnection(self, self._loop)

    @property
    def busy(self) -> bool:
        """Return whether any request is being read or served."""
        return any(connection.client_request is not None or connection.is_fresh for connection in self.connections)

    def has_capacity(self, descriptor: int) -> bool:
        """Return whether one more connection, with this descriptor, may stay. If not, the longest idle ones are closed.
        No connection may stay after the shutdown, though the loop may have accepted it just before. The kernel assigns
        the lowest free descriptor, so a high one means that nearly all are in use. At the limit itself uvloop closes
        new connections silently."""
        if self._is_over:
            return False
        is_out_of_files = descriptor >= self._last_file
        if len(self.connections) < self.settings.max_connections and not is_out_of_files:
            return True
        now = self.now()
        if now - self._no_idle_at >= IDLE_SEARCH_INTERVAL:
            if self._close_longest_idle():
                return True
            self._no_idle_at = now
        if is_out_of_files:
            report_out_of_files(CANNOT_ACCEPT)
        else:
            self._turned_away += 1
        self.count_closed(CloseReason.OUT_OF_FILES if is_out_of_files else CloseReason.MAX_CONNECTIONS, 1)
        return False

    def check(self, now: float) -> None:
        """Check all connections; called by the sweep, which costs less than a timer per connection."""
        check_all(self.connections, now, ClientConnection.internal_error)
        if self._turned_away:
            limit, turned_away, self._turned_away = self.settings.max_connections, self._turned_away, 0
            log.warning("rejected %d connections: listen.maxConnections (%d) reached", turned_away, limit)

    async def shutdown(self, timeout: float) -> None:
        """Give requests `timeout` seconds to end, and as many again after they were cancelled."""
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
        """Close the connections that the sweep has seen idle the longest. They stop counting at once: the loop reports
        their end later, and each new client would close as many again."""
        idle = [each for each in self.connections if each.is_replaceable]
        idle.sort(key=lambda each: math.inf if each.idle_since is None else each.idle_since)
        for each in idle[: 1 + self.settings.max_connections // 20]:
            self.connections.discard(each)
            each.close()
        return bool(idle)

    async def stop(self, grace: float) -> None:
        """Accept no new connections. Requests in flight have `grace` seconds to end; then they are aborted, or refused
        if nothing was sent."""
        self.service.stopping = True
        for server in self._port_servers:
            server.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        end = asyncio.get_running_loop().time() + grace
        while self.busy and asyncio.get_running_loop().time() < end:
            for connection in tuple(self.connections):
                if connection.idle and not connection.is_fresh:  # fresh ones get a moment for their first request
                    connection.close()
            await asyncio.sleep(0.02)
        self._stop_requests()
        await asyncio.sleep(0)
        await self.shutdown(0.1)
        await self._tasks.stop()
        self.upstream.close()

    def prepare_collecting(self, client_request: HttpRequest, size: int) -> bool:
        """Authenticate a request by its head and acquire memory for its body, of `size` bytes, which comes in several
        reads. Return False to serve it at once, with a stream for its body: requests that are refused by their head or
        need no pod do not wait for their bodies."""
        return self.service.authenticate_now(client_request) and self._bodies.prepare_collecting(client_request, size)

    def unserved(self, client_request: HttpRequest, why: RequestError | Ending) -> None:
        """End a request that was not served: it could not be read, or its connection ended."""
        self.service.unserved(client_request, why)

    def _serve(self, client_request: HttpRequest) -> Coroutine[Any, Any, None]:
        return self.service.serve(client_request, ClientRelay(client_request, self.context))

    def _end_preflight(self, client_request: HttpRequest) -> None:
        """End a preflight request that `Cors` has responded to."""
        self.service.ended(client_request, Ending.COMPLETE, None)
        client_request.end()

    def _stop_requests(self) -> None:
        """Abort all requests at once, so that waiting ones do not get the freed capacity. Closing their connections
        would make some responses look complete."""
        for connection in tuple(self.connections):
            if isinstance(connection.writer, Response | ResponseRace):
                connection.writer.stop()
            elif connection.writer is None:
                connection.stop()
