"""The admin port: metrics and probes for everyone who reaches it, pods and configuration for holders of the key."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from proxy.core.errors import BodyTooLarge, Forbidden, MethodNotAllowed, NotFound, RequestError, Unauthorized
from proxy.fleet.datastore import Fleet
from proxy.http.admin_answers import json_answer
from proxy.http.admin_config import redacted
from proxy.http.admin_pods import PodRoutes
from proxy.http.admin_relay import PodRelay
from proxy.openai.render import render
from proxy.telemetry.exposition import Exposition

log = logging.getLogger(__name__)

OPEN_PATHS = ("/metrics", "/healthz", "/readyz")
"""What needs no key: orchestrators and Prometheus ask for it. Every other path does, those that do not exist too."""

LARGEST_BODY = 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_application(
    *,
    fleet: Fleet,
    exposition: Exposition,
    config: Callable[[], Any],
    session: aiohttp.ClientSession,
    stopping: Callable[[], bool],
    api_key: str | None = None,
) -> web.Application:
    """`config` gives the effective configuration as plain values, with the origin of each; secrets are taken out here.
    `session` reaches the pods. Without a key everything is open, which is for loopback."""
    app = web.Application(middlewares=[_in_json, _requiring(api_key)], client_max_size=LARGEST_BODY)
    probes = _Probes(fleet, exposition, stopping)
    app.router.add_get("/metrics", probes.metrics)
    app.router.add_get("/healthz", probes.alive)
    app.router.add_get("/readyz", probes.ready)
    app.router.add_get("/admin/config", _answering(lambda: redacted(config())))
    PodRoutes(fleet).add_to(app.router)
    app.router.add_route("*", "/admin/pods/{name}/proxy/{path:.*}", PodRelay(fleet, session).relay)
    return app


class _Probes:
    def __init__(self, fleet: Fleet, exposition: Exposition, stopping: Callable[[], bool]) -> None:
        self._fleet = fleet
        self._exposition = exposition
        self._stopping = stopping

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._exposition.render(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def alive(self, request: web.Request) -> web.Response:
        """200 as long as the event loop turns."""
        return json_answer({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 exactly when new requests are wanted."""
        stopping, ready = self._stopping(), len(self._fleet.ready)
        wanted = bool(ready) and not stopping
        detail = {
            "ready": wanted,
            "stopping": stopping,
            "pods": {"ready": ready, "total": len(self._fleet.endpoints)},
        }
        return json_answer(detail, 200 if wanted else 503)


def _answering(value: Callable[[], Any]) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return json_answer(value())

    return answer


def _requiring(api_key: str | None) -> Any:
    expected = None if api_key is None else api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in OPEN_PATHS and not _holds(expected, request):
            raise Unauthorized("The admin port needs its key: send `Authorization: Bearer <admin.apiKey>`.")
        if request.method not in ("GET", "HEAD") and _is_of_another_site(request):
            raise Forbidden("A page of another site may not change anything here.")
        return await handler(request)

    return check


def _holds(expected: bytes, request: web.Request) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "replace"), expected)


def _is_of_another_site(request: web.Request) -> bool:
    """Browsers name the site of the page that sends; without a key, any page its user opens could send to loopback."""
    origin = request.headers.get("origin")
    return origin is not None and origin.rpartition("//")[2] != request.host


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
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


def _rendered(error: RequestError, request: web.Request) -> web.Response:
    status, headers, body = render(error, "", request.headers.get("x-request-id", ""))
    answer = web.Response(status=status, body=body)
    for name, value in headers:
        if value:
            answer.headers[name] = value
    if isinstance(error, Unauthorized):
        answer.headers["www-authenticate"] = "Bearer"
    return answer
