"""What only a simulated engine has: its log and its insides, for tests from outside."""

from __future__ import annotations

from aiohttp import web

from proxy.sim.api.call import Call, Service, json_response
from proxy.sim.api.routes import Route


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/admin/requests", self.requests),
            Route("GET", "/admin/state", self.state),
            Route("POST", "/admin/reset", self.reset),
        ]

    async def requests(self, call: Call) -> web.StreamResponse:
        return json_response([record.as_json() for record in self._service.log])

    async def state(self, call: Call) -> web.StreamResponse:
        engine, log = self._service.driver.engine, self._service.log
        return json_response(
            {
                "running": len(engine.running),
                "waiting": len(engine.waiting),
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
