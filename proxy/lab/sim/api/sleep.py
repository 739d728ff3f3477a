"""Sleep, as vLLM has it in its development mode: the weights leave the GPU, the KV cache is gone."""

from __future__ import annotations

from aiohttp import web

from proxy.lab.sim.api.call import SERVER, Call, Service, json_response
from proxy.lab.sim.api.routes import Route


class Sleep:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/sleep", self.sleep),
            Route("POST", "/wake_up", self.wake_up),
            Route("GET", "/is_sleeping", self.is_sleeping),
        ]

    async def sleep(self, call: Call) -> web.StreamResponse:
        """`?level=2` discards the weights too. Who is asleep answers all the same: to see that nobody asks."""
        engine = self._service.driver.engine
        engine.sleep_level = int(call.request.query.get("level", "1"))
        engine.forget_prefixes()
        return web.Response(headers={"Server": SERVER})

    async def wake_up(self, call: Call) -> web.StreamResponse:
        self._service.driver.engine.sleep_level = 0
        return web.Response(headers={"Server": SERVER})

    async def is_sleeping(self, call: Call) -> web.StreamResponse:
        return json_response({"is_sleeping": self._service.driver.engine.sleep_level > 0})
