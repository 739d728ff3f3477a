"""The admin port: its server and its routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, BodyTimeout, BodyTooLarge, MethodNotAllowed, NotFound, RequestError
from proxy.core.files import open_files_limit
from proxy.core.ports import SystemClock
from proxy.core.tasks import Tasks
from proxy.fleet.store import Fleet
from proxy.http.admin_config import (
    AutoscaleRoutes,
    ConfigRoutes,
    Configurations,
    DecisionRoutes,
    Explained,
    LoggingRoutes,
)
from proxy.http.admin_keys import (
    DOORSTEPS,
    METRICS,
    Handler,
    Hosts,
    Keys,
    audited,
    json_response,
    requiring,
    serving_hosts,
)
from proxy.http.admin_pods import PodRelay, PodRoutes
from proxy.http.guards import SendProgress, Sweep, reset
from proxy.http.server import listen_on, port_of
from proxy.http.settings import SEND_TIMEOUT, AdminSettings, PodTlsContexts, server_context
from proxy.openai.errors import render
from proxy.telemetry.logs import LogLevels
from proxy.telemetry.observation import Exposition

if TYPE_CHECKING:
    from proxy.autoscale.scaled_pool import ScaledPool

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""Seconds that running admin requests get when the process stops."""

MOST_CONNECTIONS = 256
"""Largest number of connections of the port. They use descriptors that the data port needs too."""

IDLE_TIMEOUT = 75.0
"""Seconds that a connection stays open without a complete request head."""


class AdminServer:
    """The admin port, which is open inside `async with`."""

    def __init__(
        self,
        settings: AdminSettings,
        application: web.Application,
        send_timeout: float = SEND_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        """`send_timeout`: seconds after which the connection of a client that reads nothing is reset. With few
        descriptors there are fewer than `most_connections`."""
        self._settings = settings
        self._send_timeout = send_timeout
        self._sweep = Sweep(SystemClock(), send_timeout)
        self._progress: dict[Any, SendProgress] = {}
        self._tasks = Tasks()
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=log,
            shutdown_timeout=SHUTDOWN_SECONDS,
            keepalive_timeout=idle_timeout,
        )
        self._most_connections = min(most_connections, open_files_limit() // 4)
        self._port_servers: list[asyncio.Server] = []

    async def __aenter__(self) -> AdminServer:
        """Raise OSError if the address is in use or invalid, or if the certificate is unusable."""
        await self._runner.setup()
        try:
            tls = None if self._settings.tls is None else server_context(self._settings.tls, "admin.tls")
            self._port_servers = await listen_on(self._connection, self._settings.host, self._settings.port, (), tls)
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweep.watched.add(self)
        self._tasks.keep(self._sweep.run, "admin-stall-sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._port_servers:
            server.close()
        await self._runner.cleanup()
        await self._tasks.stop()

    def check(self, now: float) -> None:
        """Check all connections; called by the sweep. A handler that closes its connection drops the transport before
        the client is gone, so the transport is stored when the handler is first seen."""
        known, self._progress = self._progress, {}
        for handler in [] if self._runner.server is None else self._runner.server.connections:
            if handler in known:
                self._progress[handler] = known[handler]
            elif handler.transport is not None:
                self._progress[handler] = SendProgress(handler.transport)
        for progress in self._progress.values():
            if progress.stalled_for(now) > self._send_timeout:
                reset(progress.transport)

    @property
    def port(self) -> int:
        """The open port, also if the settings say 0."""
        return port_of(self._port_servers)

    def _connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self._most_connections:
            return _TurnedAway()
        return server()


class _TurnedAway(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Return False for requests that are not HTTP. aiohttp logs each with a traceback, with which anyone who reaches
    the port could fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log.addFilter(_is_a_fault)


LARGEST_BODY = 1024 * 1024

BODY_TIMEOUT = 30.0
"""Seconds from the head of a request to the end of its body."""


class Routes(Protocol):
    """The routes of another package."""

    def add_to(self, router: web.UrlDispatcher) -> None: ...


def admin_application(
    *,
    fleet: Fleet,
    exposition: Exposition,
    config: Callable[[], Any],
    session: aiohttp.ClientSession,
    pod_tls: PodTlsContexts | None = None,
    stopping: Callable[[], bool],
    keys: Keys,
    hosts: Hosts,
    configurations: Configurations,
    breaker: Callable[[Endpoint], str] = lambda endpoint: "closed",
    replicas: Callable[[], Mapping[str, Any]] = dict,
    workers: Callable[[], Mapping[str, int]] = dict,
    scaled: Callable[[], Mapping[str, ScaledPool]] = dict,
    dashboard: Routes | None = None,
    explained: Explained | None = None,
    levels: LogLevels | None = None,
    body_timeout: float = BODY_TIMEOUT,
) -> web.Application:
    """`config` returns the effective configuration as plain values with the origin of each. `session` connects to the
    pods, `breaker` returns the breaker state of a pod, `replicas` the status of other proxies, `workers` the running
    and configured number of processes, if there are several. `scaled` are the pools with a scaling policy. See
    `requiring` for `keys` and `serving_hosts` for `hosts`."""
    checks = [audited, in_json, serving_hosts(hosts, keys), requiring(keys), reading_bodies(body_timeout)]
    app = web.Application(middlewares=checks, client_max_size=LARGEST_BODY)
    probes = _Probes(fleet, exposition, stopping, replicas, workers)
    app.router.add_get(METRICS, probes.metrics)
    app.router.add_get("/healthz", probes.alive)
    app.router.add_get("/readyz", probes.ready)
    ConfigRoutes(config, configurations, keys).add_to(app.router)
    PodRoutes(fleet, breaker).add_to(app.router)
    AutoscaleRoutes(scaled, fleet).add_to(app.router)
    if dashboard is not None:
        dashboard.add_to(app.router)
        for path in DOORSTEPS:
            app.router.add_get(path, _to_dashboard)
    if explained is not None:
        DecisionRoutes(explained).add_to(app.router)
    if levels is not None:
        LoggingRoutes(levels).add_to(app.router)
    app.router.add_route(
        "*", "/admin/pods/{name}/proxy/{path:.*}", PodRelay(fleet, session, pod_tls or PodTlsContexts()).relay
    )
    return app


@dataclass(frozen=True, slots=True)
class _Probes:
    fleet: Fleet
    exposition: Exposition
    stopping: Callable[[], bool]
    replicas: Callable[[], Mapping[str, Any]]
    workers: Callable[[], Mapping[str, int]]

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self.exposition.render(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def alive(self, request: web.Request) -> web.Response:
        """200 while the event loop runs."""
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 exactly if new requests are accepted."""
        stopping, ready = self.stopping(), sum(pod is pod.first_rank for pod in self.fleet.ready)
        wanted = self.fleet.serves and not stopping
        pods = {"ready": ready, "total": len(self.fleet.pods)}
        detail: dict[str, Any] = {"ready": wanted, "stopping": stopping, "pods": pods}
        if workers := self.workers():
            detail["workers"] = workers
        if replicas := self.replicas():
            detail["replicas"] = replicas
        return json_response(detail, 200 if wanted else 503)


async def _to_dashboard(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"location": "/dashboard"})


@web.middleware
async def in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every failure, including failures of aiohttp, as an OpenAI error."""
    try:
        return await handler(request)
    except RequestError as error:
        return _rendered(error, request)
    except web.HTTPMethodNotAllowed as error:
        allowed = sorted(error.allowed_methods)
        message = f"{request.method} is not allowed here; allowed: {', '.join(allowed)}."
        return _rendered(MethodNotAllowed(message, allowed), request)
    except web.HTTPNotFound:
        advice = " Inference paths are on the data port." if request.path.startswith("/v1/") else ""
        return _rendered(NotFound(f"The admin port has no {request.path}.{advice}"), request)
    except web.HTTPRequestEntityTooLarge:
        return _rendered(BodyTooLarge(f"The body is larger than {LARGEST_BODY} bytes."), request)
    except Exception:
        log.exception("admin: %s %s failed", request.method, request.path)
        return _rendered(RequestError("The request failed inside kvlane; its log says why."), request)


def reading_bodies(timeout: float) -> Any:
    """Return a middleware that reads the body of a request before its handler runs. Raise BodyTimeout after `timeout`
    seconds, and BadRequest if the body is malformed or its client leaves."""

    @web.middleware
    async def read(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.body_exists:
            try:
                async with asyncio.timeout(timeout):
                    await request.read()
            except TimeoutError:
                raise BodyTimeout(f"The request body did not arrive within {timeout:g} s.") from None
            except web.RequestPayloadError as error:
                raise BadRequest(f"The request body is malformed: {' '.join(str(error).split())}") from None
            except ConnectionError:
                raise BadRequest("The client closed the connection before its request body was complete.") from None
        return await handler(request)

    return read


def _rendered(error: RequestError, request: web.Request) -> web.Response:
    status, headers, body = render(error, "", request.headers.get("x-request-id", ""))
    response = web.Response(status=status, body=body)
    for name, value in headers:
        if value:
            response.headers[name] = value
    return response
