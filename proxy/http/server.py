"""The data port: takes requests of clients, hands those for pods to the gateway and answers the others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import orjson

import proxy
from proxy.core.errors import NoEndpoints, Reason, RequestError, ShuttingDown, UnknownModel
from proxy.core.exchange import Ending, Exchange
from proxy.core.ports import Call, Clock, Relay
from proxy.core.tasks import Tasks
from proxy.http.answer import Answer, Rim
from proxy.http.body import BodyReader
from proxy.http.call import HttpCall
from proxy.http.clients import Clients
from proxy.http.paths import Kind, Paths
from proxy.http.relay import ClientRelay
from proxy.http.settings import Listen, Security
from proxy.http.sweep import Sweep
from proxy.http.upstream.pool import UpstreamPool
from proxy.openai.render import render
from proxy.reliability.settings import Timeouts

log = logging.getLogger(__name__)

BACKLOG = 1024
CLIENT_LEFT = 499
INTERNAL = Reason.INTERNAL
JSON = [("content-type", "application/json")]

OnEnd = Callable[[Call, int, Ending | Reason, Exchange | None, int], None]
"""(call, status sent or 499, outcome, last leg, bytes of an answer of our own): once per request."""


class Gateway(Protocol):
    """What the data port needs of `proxy.gateway`."""

    async def serve(self, call: Call, relay: Relay) -> None: ...

    def health(self) -> bool: ...

    def models(self) -> list[dict[str, Any]]: ...


class DataServer:
    """Listens between `start` and `stop`."""

    def __init__(
        self,
        settings: Listen,
        security: Security,
        timeouts: Timeouts,
        gateway: Gateway,
        clock: Clock,
        on_first_byte: Callable[[Exchange], None],
        on_end: OnEnd,
    ) -> None:
        self._settings = settings
        self._gateway = gateway
        self._clock = clock
        self._on_end = on_end
        self._paths = Paths(security.relay_paths)
        self._relayed = self._paths.relayed
        ours = (settings.body_timeout, settings.head_timeout, settings.keep_alive)
        self._sweep = Sweep(clock, min(timeouts.first_byte, timeouts.idle, timeouts.request, *ours))
        self.pool = UpstreamPool(timeouts.connect, clock)
        self._bodies = BodyReader(settings, self._sweep)
        self._timeouts = timeouts
        self._on_first_byte = on_first_byte
        self._rim: Rim
        self._tasks = Tasks()
        self._clients: Clients
        self._listeners: list[asyncio.Server]
        self._stopping = False

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """On `sockets`, which are bound; else on the port of the settings. Raises OSError if it cannot be had."""
        settings = self._settings
        self._clients = Clients(self._serve, self._collects, self._unserved, settings, self._clock)
        self._sweep.watched.add(self._clients)
        loop = asyncio.get_running_loop()
        self._rim = Rim(self.pool, self._timeouts, self._clock, loop, self._on_first_byte)
        self._listeners = [await loop.create_server(self._clients, sock=sock, backlog=BACKLOG) for sock in sockets]
        if not sockets:
            self._listeners.append(
                await loop.create_server(self._clients, settings.host, settings.port, backlog=BACKLOG)
            )
        self._tasks.start(self._sweep.run(), "stall sweep")
        self._tasks.start(self._reap(), "idle connections")

    @property
    def port(self) -> int:
        port: int = self._listeners[0].sockets[0].getsockname()[1]
        return port

    @property
    def retained(self) -> int:
        """Bytes of request bodies in memory."""
        return self._bodies.budget.used

    async def stop(self, grace: float) -> None:
        """No new connections; requests in flight have `grace` seconds to end, then they are cut."""
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        end = asyncio.get_running_loop().time() + grace
        while self._clients.busy and asyncio.get_running_loop().time() < end:
            self._clients.close_idle()
            await asyncio.sleep(0.02)
        self._evict()
        await asyncio.sleep(0)
        await self._clients.shutdown(0.1)
        await self._tasks.stop()
        self.pool.close()

    def _collects(self, call: HttpCall, size: int) -> bool:
        """What is refused on its head, or answered here, does not wait for its body."""
        return (call.method, call.path) in self._relayed and self._bodies.collects(call, size)

    async def _serve(self, call: HttpCall) -> None:
        if self._stopping:
            call.closing = True
        relay = ClientRelay(call, self._rim)
        outcome: Ending | Reason = INTERNAL
        try:
            if (call.method, call.path) in self._relayed or self._kind(call) is Kind.RELAY:
                if not self._bodies.is_here(call):
                    await self._bodies.read(call)
                await self._gateway.serve(call, relay)
                exchange = relay.exchange
                if exchange is None or exchange.ending is None:
                    raise RuntimeError("served, but not relayed")
                outcome = exchange.ending
            else:
                self._answer(call)
                outcome = Ending.COMPLETE
        except RequestError as error:
            outcome = error.reason
            self._refuse(call, error)
        except asyncio.CancelledError:
            outcome = Ending.CLIENT_GONE if call.transport.is_closing() else Ending.EVICTED
            call.closing = True
            raise
        except Exception:
            log.exception("request %s failed", call.id)
            self._refuse(call, RequestError("Internal error; the log of the proxy says more."))
        finally:
            self._bodies.budget.give(call.retained)
            try:
                self._on_end(call, call.answered or CLIENT_LEFT, outcome, relay.exchange, call.sent)
            finally:
                call.connection.answered(call)

    def _unserved(self, call: HttpCall, why: RequestError | Ending) -> None:
        """Ends what `_serve` was not given, or not yet."""
        call.closing = True
        self._bodies.budget.give(call.retained)
        if isinstance(why, RequestError):
            self._refuse(call, why)
        outcome = why.reason if isinstance(why, RequestError) else why
        self._on_end(call, call.answered or CLIENT_LEFT, outcome, None, call.sent)

    def _kind(self, call: HttpCall) -> Kind:
        """Raises NotFound or MethodNotAllowed."""
        return self._paths.route(call.method, call.path).kind

    def _answer(self, call: HttpCall) -> None:
        """What needs no pod. Raises RequestError."""
        kind = self._kind(call)
        if kind is Kind.HEALTH:
            if self._stopping:
                raise ShuttingDown
            if not self._gateway.health():
                raise NoEndpoints("No pod is ready; try again shortly.")
            call.answer(200, [("x-request-id", call.id)], b"")
            return
        if kind is Kind.VERSION:
            said: dict[str, Any] = {"version": proxy.__version__}
        elif kind is Kind.MODELS:
            said = {"object": "list", "data": self._gateway.models()}
        else:
            said = self._model(call.path.removeprefix("/v1/models/"))
        call.answer(200, [("x-request-id", call.id), *JSON], orjson.dumps(said))

    def _model(self, name: str) -> dict[str, Any]:
        name = unquote(name)
        for card in self._gateway.models():
            if card["id"] == name:
                return card
        raise UnknownModel(name)

    def _refuse(self, call: HttpCall, error: RequestError) -> None:
        if call.answered:
            call.closing = True
            call.transport.abort()
            return
        call.answer(*render(error, call.path, call.id))

    def _evict(self) -> None:
        """Closing their connections would make some answers look whole."""
        for connection in self._clients.connections:
            if isinstance(connection.sink, Answer):
                connection.sink.evict()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.pool.reap()
