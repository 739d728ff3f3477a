"""The admin port: metrics and probes for everyone who reaches it, pods and configuration for holders of the key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, BodyTimeout, BodyTooLarge, MethodNotAllowed, NotFound, RequestError
from proxy.fleet.datastore import Fleet
from proxy.http.admin_answers import json_answer
from proxy.http.admin_autoscale import AutoscaleRoutes, Scaled
from proxy.http.admin_config import ConfigRoutes, Configurations
from proxy.http.admin_decisions import DecisionRoutes, Explained
from proxy.http.admin_keys import (
    DOORSTEPS,
    METRICS,
    Handler,
    Hosts,
    Keys,
    audited,
    no_hosts,
    nobody,
    requiring,
    serving_hosts,
)
from proxy.http.admin_logging import LoggingRoutes
from proxy.http.admin_pods import PodRoutes
from proxy.http.admin_relay import PodRelay
from proxy.http.upstream.trust import Trust
from proxy.openai.render import render
from proxy.telemetry.exposition import Exposition
from proxy.telemetry.log_levels import LogLevels

log = logging.getLogger(__name__)

LARGEST_BODY = 1024 * 1024

BODY_TIMEOUT = 30.0
"""Seconds from the head of a request to the end of its body."""


class Routes(Protocol):
    """Paths of another room."""

    def add_to(self, router: web.UrlDispatcher) -> None: ...


def admin_application(
    *,
    fleet: Fleet,
    exposition: Exposition,
    config: Callable[[], Any],
    session: aiohttp.ClientSession,
    trust: Trust | None = None,
    stopping: Callable[[], bool],
    keys: Keys = nobody,
    hosts: Hosts = no_hosts,
    configurations: Configurations,
    breaker: Callable[[Endpoint], str] = lambda endpoint: "closed",
    replicas: Callable[[], Mapping[str, Any]] = dict,
    workers: Callable[[], Mapping[str, int]] = dict,
    scaled: Callable[[], Mapping[str, Scaled]] = dict,
    dashboard: Routes | None = None,
    explained: Explained | None = None,
    levels: LogLevels | None = None,
    body_timeout: float = BODY_TIMEOUT,
) -> web.Application:
    """`config` gives the effective configuration as plain values, with the origin of each. `session` reaches the pods,
    `breaker` gives the state of a pod's, `replicas` what is to be said of other proxies, `workers` how
    many processes serve and how many there should be, where there are several. `scaled` are the pools with a scaling
    policy. `keys`: see `requiring`. `hosts`: see `serving_hosts`."""
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
    app.router.add_route("*", "/admin/pods/{name}/proxy/{path:.*}", PodRelay(fleet, session, trust or Trust()).relay)
    return app


class _Probes:
    def __init__(
        self,
        fleet: Fleet,
        exposition: Exposition,
        stopping: Callable[[], bool],
        replicas: Callable[[], Mapping[str, Any]],
        workers: Callable[[], Mapping[str, int]],
    ) -> None:
        self._fleet = fleet
        self._exposition = exposition
        self._stopping = stopping
        self._replicas = replicas
        self._workers = workers

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._exposition.render(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def alive(self, request: web.Request) -> web.Response:
        """200 as long as the event loop turns."""
        return json_answer({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 exactly when new requests are wanted."""
        stopping, ready = self._stopping(), len(self._fleet.ready)
        wanted = self._fleet.serves and not stopping
        detail = {
            "ready": wanted,
            "stopping": stopping,
            "pods": {"ready": ready, "total": len(self._fleet.endpoints)},
        }
        if workers := self._workers():
            detail["workers"] = workers
        if replicas := self._replicas():
            detail["replicas"] = replicas
        return json_answer(detail, 200 if wanted else 503)


async def _to_dashboard(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"location": "/dashboard"})


@web.middleware
async def in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the shape of an OpenAI error; those of aiohttp itself too."""
    try:
        return await handler(request)
    except RequestError as error:
        return _rendered(error, request)
    except web.HTTPMethodNotAllowed as error:
        allowed = sorted(error.allowed_methods)
        message = f"{request.method} is not allowed here; allowed: {', '.join(allowed)}."
        return _rendered(MethodNotAllowed(message, allowed), request)
    except web.HTTPNotFound:
        return _rendered(NotFound(f"The admin port has no {request.path}."), request)
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
    answer = web.Response(status=status, body=body)
    for name, value in headers:
        if value:
            answer.headers[name] = value
    return answer
