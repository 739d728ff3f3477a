"""Between the routes and their handlers: requests that meet a fault, and a pod that is not well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import Call, Service, raw_json
from proxy.lab.sim.api.errors import ApiError, EngineDead, EngineGone, Loading, busy
from proxy.lab.sim.api.spoil import break_off, spoil_whole
from proxy.lab.sim.api.stream import DONE, EventStream, data
from proxy.lab.sim.faults import BROKEN, OUTAGES, SPOILT, STATES, Fault, Kind
from proxy.lab.sim.transfer.connector import EngineStops

RESTART = 30.0
"""Seconds after which a pod is back whose engine a request has ended."""

Handler = Callable[[Call], Awaitable[web.StreamResponse]]


class Faulty:
    """Faults are met by POSTs of clients; states are there for everybody."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, handle: Handler, call: Call) -> web.StreamResponse:
        """Raises ApiError."""
        fault = call.fault
        if fault is not None:
            self._begin(fault)
        self._refuse_while_unwell(call)
        try:
            return await (handle(call) if fault is None else self._spoilt(handle, call, fault))
        except EngineStops:
            self._begin(Fault(Kind.ENGINE_DEAD, seconds=RESTART))
            never: asyncio.Future[web.StreamResponse] = asyncio.get_running_loop().create_future()
            return await never

    def _begin(self, fault: Fault) -> None:
        service = self._service
        now = service.driver.now()
        if fault.kind in OUTAGES:
            service.out(fault)
        if fault.kind is Kind.SLOW_START:
            service.driver.engine.forget_prefixes()
            service.driver.slow_down(fault.factor, fault.seconds)
        elif fault.kind is Kind.FROZEN:
            service.driver.freeze(fault.seconds)
        if fault.kind in STATES:
            service.condition.begin(fault.kind, now, now + fault.seconds)

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
