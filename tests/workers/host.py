"""Simulated pods, and workers in processes of their own before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.settings import Settings, from_mapping
from proxy.sim import SimConfig, SimFleet
from proxy.supervisor.supervisor import Supervisor

CHAT = "/v1/chat/completions"


def configured(sim: SimFleet, **sections: Mapping[str, Any]) -> Settings:
    given: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "pods": {"static": [{"url": url, "name": f"pod-{index}"} for index, url in enumerate(sim.urls)]},
        "telemetry": {"accessLog": False, "logLevel": "error"},
        "reliability": {"drain": {"grace": "10s"}},
    }
    return from_mapping({**given, **sections})


def question(text: str, tokens: int = 4, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }


@dataclass
class Host:
    sim: SimFleet
    supervisor: Supervisor
    admin_http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.supervisor.port}"

    async def chat(self, text: str, tokens: int = 4) -> str:
        """Over a connection of its own, so that any worker may get it; the name of the pod that answered."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + CHAT, json=question(text, tokens)) as response,
        ):
            response.raise_for_status()
            await response.read()
            return response.headers["x-kvlane-endpoint"]

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        url = f"http://127.0.0.1:{self.supervisor.admin_port}{path}"
        async with self.admin_http.request(method, url, json=body) as response:
            response.raise_for_status()
            return await response.json()

    async def samples(self, series: str) -> dict[str, float]:
        """The samples whose names begin so."""
        async with self.admin_http.get(f"http://127.0.0.1:{self.supervisor.admin_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith(series))
        return {name: float(value) for name, _, value in found}

    def in_flight(self) -> int:
        """As the supervisor has heard."""
        return sum(endpoint.load.requests for endpoint in self.supervisor.fleet.endpoints)


@asynccontextmanager
async def host(workers: int, pods: int = 2, config: SimConfig | None = None, **sections: Any) -> AsyncIterator[Host]:
    async with (
        SimFleet(pods, config or SimConfig(time_scale=20)) as sim,
        Supervisor(configured(sim, **sections), workers) as supervisor,
        aiohttp.ClientSession() as admin_http,
    ):
        yield Host(sim, supervisor, admin_http)
