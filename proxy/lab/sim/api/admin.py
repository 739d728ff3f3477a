"""What only a simulated engine has: its log and its insides, for tests from outside."""

from __future__ import annotations

from dataclasses import asdict

import orjson
from aiohttp import web

from proxy.lab.sim.api.call import Call, Service, json_response
from proxy.lab.sim.api.errors import BadRequest
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.faults import Fault, Kind


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/admin/requests", self.requests),
            Route("GET", "/admin/state", self.state),
            Route("POST", "/admin/reset", self.reset),
            Route("GET", "/admin/faults", self.faults),
            Route("POST", "/admin/faults", self.set_faults),
        ]

    async def requests(self, call: Call) -> web.StreamResponse:
        return json_response([record.as_json() for record in self._service.log])

    async def state(self, call: Call) -> web.StreamResponse:
        engine, log = self._service.driver.engine, self._service.log
        return json_response(
            {
                "role": engine.config.role,
                "running": len(engine.running),
                "waiting": len(engine.waiting),
                "loading": len(engine.loading),
                "kept_blocks": engine.kept_blocks,
                "kv_usage": engine.kv_usage,
                "cached_blocks": engine.pool.cached,
                "aborted": log.aborted,
                "in_flight": [record.id for record in log.open],
            }
        )

    async def reset(self, call: Call) -> web.StreamResponse:
        """Forgets prefixes and ended calls; what is in flight goes on."""
        self._service.driver.engine.forget_prefixes()
        self._service.log.clear()
        return json_response({"success": True})

    async def faults(self, call: Call) -> web.StreamResponse:
        """What requests may meet, how many did, and the states that the pod is in."""
        service = self._service
        faults = zip(service.faults.faults, service.faults.met, strict=True)
        return json_response(
            {
                "seed": service.faults.seed,
                "faults": [{**_as_json(fault), "met": met} for fault, met in faults],
                "states": [kind.value for kind in service.condition.at(service.driver.now())],
            }
        )

    async def set_faults(self, call: Call) -> web.StreamResponse:
        """Those of `{"seed": 0, "faults": [{"kind": "reset", "probability": 0.1, "events": 3}]}` in place of all
        others; see `proxy.lab.sim.faults`. A state that the pod is in passes by itself."""
        try:
            asked = orjson.loads(call.raw)
            faults = [Fault(**{**fault, "kind": Kind(fault["kind"])}) for fault in asked["faults"]]
            self._service.faults.set(faults, int(asked.get("seed", 0)))
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequest(f"These are no faults: {error}") from error
        return await self.faults(call)


def _as_json(fault: Fault) -> dict[str, object]:
    return {**asdict(fault), "kind": fault.kind.value}
