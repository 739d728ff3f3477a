"""From path and method to a handler; every call is recorded, every refusal rendered."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from aiohttp import ClientConnectionResetError, web

from proxy.lab.sim.api.call import Call, Service, json_response, raw_json
from proxy.lab.sim.api.errors import ApiError, NoRoute
from proxy.lab.sim.api.faulty import Faulty, Handler
from proxy.lab.sim.faults import Fault
from proxy.lab.sim.requests import RequestRecord

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

    async def answer(self, request: web.Request) -> web.StreamResponse:
        record = self._record(request)
        recorded = not _is_unrecorded(request.path)
        if recorded:
            self._service.log.begin(record)
        aborted = True
        try:
            response = await self._answer(request, record)
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

    async def _answer(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        try:
            handle, tail = self._find(request.method, request.path)
            raw = await request.read()
            record.body_sha256 = hashlib.sha256(raw).hexdigest()
            fault = self._fault(request, record)
            return await self._faulty.answer(handle, Call(record.id, request, raw, record, tail, fault))
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
