"""The application of a pod: it records every request, applies faults and renders every error."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from uuid import uuid4

from aiohttp import ClientConnectionResetError, web

from proxy.lab.sim import fields
from proxy.lab.sim.faults import BROKEN, OUTAGES, SPOILT, STATES, Fault, FaultKind
from proxy.lab.sim.fields import BUSY, ENGINE_DEAD, ENGINE_GONE, LOADING, SimError, internal, unavailable
from proxy.lab.sim.http import (
    EventStream,
    Handler,
    RequestRecord,
    Routes,
    SimRequest,
    SimService,
    break_off,
    json_response,
    spoil_whole,
)
from proxy.lab.sim.transfer import EngineStops

LARGEST_BODY = 256 * 1024 * 1024

RESTART = 30.0
"""Seconds until a pod restarts whose engine a request has stopped."""

UNRECORDED = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/v1/models"})
"""Polled paths, which would displace the requests of clients from the log."""

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]

RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)


def application(service: SimService, routes: Routes) -> web.Application:
    app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_recording(service)])
    app.on_response_prepare.append(_name_server)
    for route, handle in routes.items():
        method, path = route.split()
        for each in ("GET", "HEAD") if method == "GET" else (method,):
            app.router.add_route(each, path, partial(_handle, service, handle))
    return app


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "uvicorn"


def _recording(service: SimService) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def respond(
        request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        record = request[RECORD] = _record(request, service.driver.now())
        recorded, aborted = not _is_unrecorded(request.path), True
        if recorded:
            service.log.start(record)
        try:
            response = await _rendered(request, handler)
            record.status = response.status
            aborted = False
            return response
        finally:
            if recorded:
                service.log.end(record, service.driver.now(), aborted=aborted)

    return respond


def _record(request: web.Request, now: float) -> RequestRecord:
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        key = name.lower()
        text = value.encode(errors="replace").decode()  # JSON accepts no surrogates, as which other bytes arrive
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return RequestRecord(headers.get("x-request-id") or uuid4().hex[:16], request.method, request.path, headers, now)


async def _rendered(request: web.Request, handler: Next) -> web.StreamResponse:
    try:
        return await handler(request)
    except SimError as error:
        anthropic = request.path.startswith("/v1/messages")
        return json_response(error.anthropic() if anthropic else error.openai(), error.status)
    except web.HTTPException as error:
        response = json_response({"detail": error.reason}, error.status)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return response
    except ClientConnectionResetError as gone:
        raise asyncio.CancelledError from gone


async def _handle(service: SimService, handle: Handler, web_request: web.Request) -> web.StreamResponse:
    record, raw = web_request[RECORD], await web_request.read()
    record.body_sha256 = hashlib.sha256(raw).hexdigest()
    fault = None
    if web_request.method == "POST" and not _is_unrecorded(web_request.path):
        fault = service.faults.meet(record.id)
    request = SimRequest(service, record.id, web_request, raw, record, web_request.match_info.get("tail", ""), fault)
    if fault is not None:
        record.fault = fault.kind.value
        _apply(service, fault)
    _refuse_while_unwell(request)
    try:
        return await (handle(request) if fault is None else _spoilt(handle, request, fault))
    except EngineStops:
        _apply(service, Fault(FaultKind.ENGINE_DEAD, seconds=RESTART))
        never: asyncio.Future[web.StreamResponse] = asyncio.get_running_loop().create_future()
        return await never


def _apply(service: SimService, fault: Fault) -> None:
    now = service.driver.now()
    if fault.kind in OUTAGES:
        service.out(fault)
    if fault.kind is FaultKind.SLOW_START:
        service.driver.forget_prefixes()
        service.driver.slow_down(fault.factor, fault.seconds)
    elif fault.kind is FaultKind.FROZEN:
        service.driver.freeze(fault.seconds)
    if fault.kind in STATES:
        service.condition.start(fault.kind, now, now + fault.seconds)


def _refuse_while_unwell(request: SimRequest) -> None:
    states, path = request.service.condition.at(request.service.driver.now()), request.web_request.path
    if not states or path.startswith("/admin/"):
        return
    is_post = request.web_request.method == "POST"
    if FaultKind.LOADING in states or (
        path == "/health" and (FaultKind.UNHEALTHY in states or FaultKind.ENGINE_DEAD in states)
    ):
        raise unavailable(LOADING)
    if is_post and FaultKind.ENGINE_DEAD in states:
        raise internal(ENGINE_DEAD)
    if is_post and FaultKind.SHUTTING_DOWN in states:
        raise internal(ENGINE_GONE)


async def _spoilt(handle: Handler, request: SimRequest, fault: Fault) -> web.StreamResponse:
    if fault.kind is FaultKind.REJECT:
        return _rejection(fault)
    if fault.kind is FaultKind.ERROR_FIRST:
        if not fields.flag(request.body(), "stream"):
            raise unavailable(BUSY)
        async with EventStream(request) as stream:
            raise unavailable(BUSY)
        return stream.response
    if fault.kind in BROKEN and (not fault.events or fault.kind is FaultKind.GARBAGE):
        await break_off(request, fault.kind)
    response = await handle(request)
    if fault.kind in SPOILT and isinstance(response, web.Response):
        return await spoil_whole(request, response, fault)
    return response


def _rejection(fault: Fault) -> web.Response:
    error = SimError("Rejected by the fault `reject`.", status=fault.status, type="Service Unavailable")
    response = json_response(error.openai(), fault.status)
    if fault.retry_after is not None:
        response.headers["Retry-After"] = str(fault.retry_after)
    return response


def _is_unrecorded(path: str) -> bool:
    return path in UNRECORDED or path.startswith("/admin/")
