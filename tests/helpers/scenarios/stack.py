"""The whole proxy before simulated pods, on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.app import App
from proxy.lab.sim import SimConfig, SimFleet, SimPod
from proxy.settings import from_mapping
from proxy.tools.presets import scored_by
from tests.helpers.waiting import until

CHAT = "/v1/chat/completions"

BLIND: Mapping[str, Any] = {"pods": {"refresh": {"interval": "60s"}}}
"""Settings under which pods are scraped once, before the first request: only the ledger and the index decide."""

BY_LOAD: Mapping[str, Any] = {"scheduling": scored_by({"active-request-scorer": 1})}
"""For tests that wait until a certain pod is asked: by predictions one that was slow once gets nothing for a while."""

ResponseAndBody = tuple[aiohttp.ClientResponse, Any]
"""A response that has been read, and its JSON."""


@dataclass(frozen=True, slots=True)
class Stack:
    app: App
    sim: SimFleet
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.app.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.app.admin_port}"

    @property
    def pods(self) -> Sequence[SimPod]:
        return self.sim.pods

    def pod(self, name: str) -> SimPod:
        return self.sim.pods[int(name.removeprefix("pod-"))]

    async def chat(self, text: str = "Hello!", **fields: Any) -> ResponseAndBody:
        return await self.post(CHAT, {"model": "sim", "messages": [{"role": "user", "content": text}], **fields})

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> ResponseAndBody:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response, await response.json()

    async def operate(self, method: str, path: str, body: Any = None) -> ResponseAndBody:
        """A request to the admin port."""
        async with self.http.request(method, self.admin + path, json=body) as response:
            return response, await response.json()

    async def sample(self, series: str) -> float | None:
        """The value of one series as `/metrics` has it, labels included; None if there is no such series."""
        async with self.http.get(self.admin + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(series + " ")), None)

    async def idle(self) -> None:
        """Until neither the proxy nor a pod has anything in flight."""
        await until(lambda: not self.app.ledger.in_flight and all(pod.requests.idle.is_set() for pod in self.pods))
        assert all(endpoint.load.requests == endpoint.load.tokens == 0 for endpoint in self.app.fleet.endpoints)


@asynccontextmanager
async def stack(
    pods: int = 2,
    config: SimConfig | Sequence[SimConfig] | None = None,
    settings: Mapping[str, Any] | None = None,
    each: Sequence[Mapping[str, Any]] = (),
) -> AsyncIterator[Stack]:
    """`settings` are sections of the configuration, `each` has further keys for the pods, one by one; the pods are
    called pod-0, pod-1, …"""
    async with (
        SimFleet(pods, config or SimConfig(time_scale=20)) as sim,
        running(sim.urls, settings, each) as app,
        aiohttp.ClientSession() as http,
    ):
        yield Stack(app, sim, http)


@asynccontextmanager
async def running(
    urls: Sequence[str], settings: Mapping[str, Any] | None = None, each: Sequence[Mapping[str, Any]] = ()
) -> AsyncIterator[App]:
    static: list[dict[str, Any]] = [{"url": url, "name": f"pod-{index}"} for index, url in enumerate(urls)]
    for pod, more in zip(static, each, strict=False):
        pod.update(more)
    given: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "pods": {"static": static},
        "telemetry": {"accessLog": False},
    }
    for name, section in (settings or {}).items():
        given[name] = {**given[name], **section} if name in given else section
    async with App(from_mapping(given)) as app:
        yield app
