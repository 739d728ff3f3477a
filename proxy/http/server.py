"""The data port: takes requests of clients, hands those for pods to the gateway and answers the others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
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
from proxy.http.cors import Cors
from proxy.http.entrance import Door, Entrance, shown
from proxy.http.handshakes import Handshakes
from proxy.http.hung_up import HungUp, Tell, after, untold
from proxy.http.paths import Kind, Paths
from proxy.http.race import Race
from proxy.http.relay import ClientRelay
from proxy.http.settings import Listen, Security
from proxy.http.sweep import Sweep
from proxy.http.tls import HANDSHAKE_TIMEOUT, server_context
from proxy.http.upstream.pool import UpstreamPool
from proxy.http.upstream.trust import Trust
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
        takes: Callable[[Exchange, int], bool],
        given_up: Callable[[Exchange, float], str] = lambda exchange, heard_at: "",
        door: Door | None = None,
        trust: Trust | None = None,
        continued: Sequence[str] = (),
        hung_up: Tell = untold,
    ) -> None:
        """`takes`, `given_up`, `continued`: see `Rim`. Without a door nobody is asked who he is. `trust` is what pods
        are spoken to with over TLS."""
        self._settings = settings
        self._gateway = gateway
        self._clock = clock
        self._on_end = on_end
        self._paths = Paths(security.relay_paths)
        self._cors = security.cors
        self._relayed = self._paths.relayed
        self._sweep = Sweep(clock, self._shortest(timeouts))
        self.pool = UpstreamPool(timeouts.connect, clock, trust=trust)
        self._bodies = BodyReader(settings, self._sweep)
        self._timeouts = timeouts
        self._on_first_byte = on_first_byte
        self._takes = takes
        self._given_up = given_up
        self._continued = continued
        self._hung_up = hung_up
        self._entrance = None if door is None else Entrance(door)
        self._rim: Rim
        self._tasks = Tasks()
        self._clients: Clients
        self._listeners: list[asyncio.Server]
        self._stopping = False

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """On `sockets`, which are bound; else on the port of the settings. Raises OSError if it cannot be had, or the
        certificate cannot."""
        settings = self._settings
        serve = Cors(self._cors.origins, self._serve, self._permitted).serve if self._cors.origins else self._serve
        self._clients = Clients(serve, self._collects, self._unserved, settings, self._clock, self._hung_up)
        self._sweep.watched.add(self._clients)
        accept: Callable[[], asyncio.Protocol] = self._clients
        loop = asyncio.get_running_loop()
        self._make_rim()
        how: dict[str, Any] = {"backlog": BACKLOG}
        if settings.tls is not None:
            how |= {"ssl": server_context(settings.tls), "ssl_handshake_timeout": HANDSHAKE_TIMEOUT}
            accept = handshakes = Handshakes(accept, partial(self._hung_up, HungUp.TLS_HANDSHAKE))
            self._sweep.watched.add(handshakes)
        self._listeners = [await loop.create_server(accept, sock=sock, **how) for sock in sockets]
        if not sockets:
            self._listeners.append(await loop.create_server(accept, settings.host, settings.port, **how))
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

    def change(
        self,
        security: Security,
        timeouts: Timeouts,
        door: Door | None,
        on_first_byte: Callable[[Exchange], None],
        continued: Sequence[str] = (),
    ) -> None:
        """For requests that come from here on; of `security` the origins of CORS stay as they are."""
        self._paths = Paths(security.relay_paths)
        self._relayed = self._paths.relayed
        self._entrance = None if door is None else Entrance(door)
        self._timeouts = timeouts
        self._continued = continued
        self._on_first_byte = on_first_byte
        self._sweep.change(self._shortest(timeouts))
        self.pool.connect_timeout = timeouts.connect
        self._make_rim()

    def settle(self) -> None:
        """What comes is served, and told not to come again: connections close after their answers."""
        self._stopping = True

    async def stop(self, grace: float) -> None:
        """No new connections; requests in flight have `grace` seconds to end, then they are cut, or refused
        if nothing was answered."""
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

    def _shortest(self, timeouts: Timeouts) -> float:
        listen = self._settings
        ours = (listen.body_timeout, listen.head_timeout, listen.keep_alive)
        return min(timeouts.first_byte, timeouts.idle, timeouts.request, *ours)

    def _make_rim(self) -> None:
        loop = asyncio.get_running_loop()
        told = (self._on_first_byte, self._takes, self._given_up, self._continued)
        self._rim = Rim(self.pool, self._timeouts, self._clock, loop, *told)

    def _collects(self, call: HttpCall, size: int) -> bool:
        """What is refused on its head, or answered here, does not wait for its body."""
        if (call.method, call.path) not in self._relayed:
            return False
        return (self._entrance is None or self._entrance.is_let_in(call)) and self._bodies.collects(call, size)

    async def _serve(self, call: HttpCall) -> None:
        if self._stopping:
            call.closing = True
        relay = ClientRelay(call, self._rim)
        outcome: Ending | Reason = INTERNAL
        try:
            if self._entrance is not None and call.identity is None:
                await self._entrance.let_in(call)
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
            exchange = relay.exchange
            if call.answered and exchange is not None and exchange.ending is not None:
                outcome = exchange.ending
                relay.end()
            else:
                outcome = error.reason
                self._refuse(call, error)
        except asyncio.CancelledError:
            outcome = self._cancelled(call, relay)
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

    def _cancelled(self, call: HttpCall, relay: ClientRelay) -> Ending | Reason:
        """Its client left, or the proxy stops: who has got nothing is told to come again."""
        outcome: Ending | Reason = Ending.CLIENT_GONE if call.transport.is_closing() else Ending.EVICTED
        relay.end()
        call.closing = True
        if outcome is Ending.EVICTED and not call.answered:
            outcome = ShuttingDown.reason
            self._refuse(call, ShuttingDown())
        return outcome

    def _permitted(self, call: HttpCall) -> None:
        """What was answered in the place of `_serve`."""
        self._on_end(call, call.answered or CLIENT_LEFT, Ending.COMPLETE, None, call.sent)
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
            said = {"object": "list", "data": shown(self._gateway.models(), call.identity)}
        else:
            said = self._model(call)
        call.answer(200, [("x-request-id", call.id), *JSON], orjson.dumps(said))

    def _model(self, call: HttpCall) -> dict[str, Any]:
        name = unquote(call.path.removeprefix("/v1/models/"))
        for card in shown(self._gateway.models(), call.identity):
            if card["id"] == name:
                return card
        raise UnknownModel(name)

    def _refuse(self, call: HttpCall, error: RequestError) -> None:
        if (why := after(error)) is not None:
            self._hung_up(why, 1)
        if call.answered:
            call.closing = True
            call.transport.abort()
            return
        call.answer(*render(error, call.path, call.id))

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
