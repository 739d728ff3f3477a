"""The data port: takes requests of clients, hands those for pods to the gateway and answers the others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import orjson

import proxy
from proxy.core.errors import BadRequest, NoEndpoints, Reason, RequestError, ShuttingDown, UnknownModel
from proxy.core.exchange import Ending, Exchange
from proxy.core.ports import Call, Clock, Relay
from proxy.core.tasks import Tasks
from proxy.http.answer import Answer, Rim
from proxy.http.body import BodyReader
from proxy.http.call import HttpCall
from proxy.http.head import local_answer
from proxy.http.paths import Kind, Paths, Route
from proxy.http.relay import ClientRelay
from proxy.http.seam import CLOSED, KEPT, Answered, ClientConnection, ClientServer
from proxy.http.settings import Listen, Security
from proxy.http.sweep import Sweep
from proxy.http.upstream.pool import UpstreamPool
from proxy.openai.render import render
from proxy.reliability.settings import Timeouts

log = logging.getLogger(__name__)

FIELD_LIMIT = 64 * 1024
"""Bytes of a request line or header field."""

BACKLOG = 1024
CLIENT_LEFT = 499
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
        self._sweep = Sweep(clock, min(timeouts.first_byte, timeouts.idle, timeouts.request, settings.body_timeout))
        self.pool = UpstreamPool(timeouts.connect, clock)
        self._bodies = BodyReader(settings, self._sweep)
        self._timeouts = timeouts
        self._on_first_byte = on_first_byte
        self._rim: Rim
        self._ids = map(f"{os.urandom(8).hex()}{{:012x}}".format, itertools.count(1))
        self._tasks = Tasks()
        self._clients: ClientServer
        self._listeners: list[asyncio.Server]
        self._stopping = False
        self._active = 0

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """On `sockets`, which are bound; else on the port of the settings. Raises OSError if it cannot be had."""
        self._clients = ClientServer(
            self._handle,
            HttpCall,
            self._malformed,
            max_line_size=FIELD_LIMIT,
            max_field_size=FIELD_LIMIT,
            lingering_time=5.0,
        )
        loop = asyncio.get_running_loop()
        self._rim = Rim(self.pool, self._timeouts, self._sweep, self._clock, loop, self._on_first_byte)
        self._listeners = [await loop.create_server(self._clients, sock=sock, backlog=BACKLOG) for sock in sockets]
        if not sockets:
            host, port = self._settings.host, self._settings.port
            self._listeners.append(await loop.create_server(self._clients, host, port, backlog=BACKLOG))
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
        while self._active and asyncio.get_running_loop().time() < end:
            self._clients.close_idle()
            await asyncio.sleep(0.02)
        self._evict()
        await asyncio.sleep(0)
        await self._clients.shutdown(0.1)
        await self._tasks.stop()
        self.pool.close()

    async def _handle(self, call: HttpCall) -> Answered:
        call.received_at = self._clock.now()
        call.name(call.headers.get("x-request-id") or next(self._ids))
        if self._stopping:
            call.closing = True
        self._active += 1
        relay = ClientRelay(call, self._rim)
        outcome: Ending | Reason = Reason.INTERNAL
        try:
            outcome = await self._serve(call, relay)
        except RequestError as error:
            outcome = error.reason
            self._refuse(call, error)
        except asyncio.CancelledError:
            outcome = Ending.CLIENT_GONE if call.transport.is_closing() else Ending.EVICTED
            raise
        except Exception:
            log.exception("request %s failed", call.id)
            self._refuse(call, RequestError("Internal error; the log of the proxy says more."))
        finally:
            self._active -= 1
            self._bodies.budget.give(call.retained)
            self._on_end(call, call.answered or CLIENT_LEFT, outcome, relay.exchange, call.sent)
        return CLOSED if call.closing else KEPT

    async def _serve(self, call: HttpCall, relay: ClientRelay) -> Ending | Reason:
        route = self._paths.route(call.method, call.path)
        if route.kind is not Kind.RELAY:
            self._answer(call, route)
            return Ending.COMPLETE
        await self._bodies.read(call)
        await self._gateway.serve(call, relay)
        if relay.exchange is None or relay.exchange.ending is None:
            raise RuntimeError("served, but not relayed")
        return relay.exchange.ending

    def _answer(self, call: HttpCall, route: Route) -> None:
        """What needs no pod. Raises RequestError."""
        if route.kind is Kind.HEALTH:
            if self._stopping:
                raise ShuttingDown
            if not self._gateway.health():
                raise NoEndpoints("No pod is ready; try again shortly.")
            call.answer(200, [("x-request-id", call.id)], b"")
            return
        if route.kind is Kind.VERSION:
            said: dict[str, Any] = {"version": proxy.__version__}
        elif route.kind is Kind.MODELS:
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
        call.answer(*render(error, call.path, call.id), close=not call.payload.is_eof())

    def _malformed(self, connection: ClientConnection, status: int, message: str) -> None:
        """The parser could not read the request; where its body ends nobody knows, so the connection closes."""
        text = "The request could not be read: " + message.partition("\n")[0]
        _, headers, body = render(BadRequest(text), "", next(self._ids))
        connection.socket.write(local_answer(400, headers, body, connection=b"connection: close\r\n"))

    def _evict(self) -> None:
        """aiohttp would close the connections, which makes some answers look whole."""
        for connection in self._clients.connections:
            if isinstance(connection.sink, Answer):
                connection.sink.evict()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.pool.reap()
