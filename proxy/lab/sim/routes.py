"""Dispatches a path and a method to a handler; records every call and renders every error."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from aiohttp import ClientConnectionResetError, web

from proxy.lab.sim import fields
from proxy.lab.sim.faults import BROKEN, OUTAGES, SPOILT, STATES, Fault, Kind
from proxy.lab.sim.fields import ApiError, EngineDead, EngineGone, Loading, NoRoute, busy
from proxy.lab.sim.http import (
    DONE,
    Call,
    EventStream,
    RequestRecord,
    Service,
    break_off,
    data,
    json_response,
    raw_json,
    spoil_whole,
)
from proxy.lab.sim.transfer import EngineStops

RESTART = 30.0
"""Seconds after which a pod is back whose engine a request has ended."""

Handler = Callable[[Call], Awaitable[web.StreamResponse]]


class Faulty:
    """Faults are met by POSTs of clients; states are there for everybody."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def respond(self, handle: Handler, call: Call) -> web.StreamResponse:
        """Raises ApiError."""
        fault = call.fault
        if fault is not None:
            self._apply(fault)
        self._refuse_while_unwell(call)
        try:
            return await (handle(call) if fault is None else self._spoilt(handle, call, fault))
        except EngineStops:
            self._apply(Fault(Kind.ENGINE_DEAD, seconds=RESTART))
            never: asyncio.Future[web.StreamResponse] = asyncio.get_running_loop().create_future()
            return await never

    def _apply(self, fault: Fault) -> None:
        service = self._service
        now = service.driver.now()
        if fault.kind in OUTAGES:
            service.out(fault)
        if fault.kind is Kind.SLOW_START:
            service.driver.forget_prefixes()
            service.driver.slow_down(fault.factor, fault.seconds)
        elif fault.kind is Kind.FROZEN:
            service.driver.freeze(fault.seconds)
        if fault.kind in STATES:
            service.condition.start(fault.kind, now, now + fault.seconds)

    def _refuse_while_unwell(self, call: Call) -> None:
        condition, now = self._service.condition, self._service.driver.now()
        path = call.request.path
        if path.startswith("/admin/"):
            return
        if condition.holds(Kind.LOADING, now):
            raise Loading
        if path == "/health" and (condition.holds(Kind.UNHEALTHY, now) or condition.holds(Kind.ENGINE_DEAD, now)):
            raise Loading
        if call.request.method == "POST" and condition.holds(Kind.ENGINE_DEAD, now):
            raise EngineDead
        if call.request.method == "POST" and condition.holds(Kind.SHUTTING_DOWN, now):
            raise EngineGone

    async def _spoilt(self, handle: Handler, call: Call, fault: Fault) -> web.StreamResponse:
        if fault.kind is Kind.REJECT:
            return _rejection(fault)
        if fault.kind is Kind.ERROR_FIRST:
            return await _error_first(call)
        if fault.kind in BROKEN and (not fault.events or fault.kind is Kind.GARBAGE):
            await break_off(call, fault.kind)
        response = await handle(call)
        if fault.kind in SPOILT and isinstance(response, web.Response):
            return await spoil_whole(call, response, fault)
        return response


def _rejection(fault: Fault) -> web.Response:
    error = ApiError("Rejected by the fault `reject`.")
    error.status, error.type = fault.status, "Service Unavailable"
    response = raw_json(error.openai(), fault.status)
    if fault.retry_after is not None:
        response.headers["Retry-After"] = str(fault.retry_after)
    return response


async def _error_first(call: Call) -> web.StreamResponse:
    if not fields.flag(call.body(), "stream"):
        raise busy()
    async with EventStream(call) as stream:
        stream.send(data(busy().openai()))
        stream.send(DONE)
    return stream.response


UNRECORDED = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/v1/models"})
"""What a proxy asks again and again; it would push the calls of clients out of the log."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path that ends in "/*" takes any one segment there, handed over as `Call.tail`."""

    method: str
    path: str
    handle: Handler


class Dispatcher:
    """Answers every request of one pod."""

    def __init__(self, service: Service, routes: list[Route]) -> None:
        self._service = service
        self._faulty = Faulty(service)
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: list[tuple[str, str, dict[str, Handler]]] = []
        for route in routes:
            self._methods_of(route.path)[route.method] = route.handle

    def _methods_of(self, path: str) -> dict[str, Handler]:
        prefix, star, suffix = path.partition("*")
        if not star:
            return self._exact.setdefault(path, {})
        for known_prefix, known_suffix, methods in self._prefixes:
            if (prefix, suffix) == (known_prefix, known_suffix):
                return methods
        self._prefixes.append((prefix, suffix, {}))
        return self._prefixes[-1][2]

    async def respond(self, request: web.Request) -> web.StreamResponse:
        record = self._record(request)
        recorded = not _is_unrecorded(request.path)
        if recorded:
            self._service.log.start(record)
        aborted = True
        try:
            response = await self._respond(request, record)
            record.status = response.status
            aborted = False
            return response
        finally:
            if recorded:
                self._service.log.end(record, self._service.driver.now(), aborted=aborted)

    def _record(self, request: web.Request) -> RequestRecord:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            key, text = name.lower(), _readable(value)
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        return RequestRecord(
            id=headers.get("x-request-id") or uuid4().hex[:16],
            method=request.method,
            path=request.path,
            headers=headers,
            arrived=self._service.driver.now(),
        )

    async def _respond(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        try:
            handle, tail = self._find(request.method, request.path)
            raw = await request.read()
            record.body_sha256 = hashlib.sha256(raw).hexdigest()
            fault = self._fault(request, record)
            return await self._faulty.respond(handle, Call(record.id, request, raw, record, tail, fault))
        except ApiError as error:
            return _refusal(error, request.path)
        except web.HTTPException as error:
            return json_response({"detail": error.reason}, error.status)
        except ClientConnectionResetError as gone:
            raise asyncio.CancelledError from gone

    def _fault(self, request: web.Request, record: RequestRecord) -> Fault | None:
        if request.method != "POST" or _is_unrecorded(request.path):
            return None
        fault = self._service.faults.meet(record.id)
        if fault is not None:
            record.fault = fault.kind.value
        return fault

    def _find(self, method: str, path: str) -> tuple[Handler, str]:
        methods: Mapping[str, Handler] = self._exact.get(path, {})
        tail = ""
        if not methods:
            methods, tail = self._find_prefix(path)
        handle = methods.get("GET" if method == "HEAD" else method)
        if handle is None:
            raise NoRoute(methods)
        return handle, tail

    def _find_prefix(self, path: str) -> tuple[Mapping[str, Handler], str]:
        for prefix, suffix, methods in self._prefixes:
            tail = path[len(prefix) : len(path) - len(suffix)]
            if tail and "/" not in tail and path == prefix + tail + suffix:
                return methods, tail
        return {}, ""


def _is_unrecorded(path: str) -> bool:
    return path in UNRECORDED or path.startswith("/admin/")


def _readable(value: str) -> str:
    """Bytes of a header that are no UTF-8 arrive as surrogates, which JSON does not take."""
    return value.encode(errors="replace").decode()


def _refusal(error: ApiError, path: str) -> web.Response:
    anthropic = path.startswith("/v1/messages")
    response = raw_json(error.anthropic() if anthropic else error.openai(), error.status)
    if isinstance(error, NoRoute) and error.allow:
        response.headers["Allow"] = ", ".join(error.allow)
    return response
