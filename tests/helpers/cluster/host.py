"""Simulated pods, and workers in processes of their own before them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from proxy.cluster import reads, workers
from proxy.cluster.supervisor import Supervisor
from proxy.core.endpoint import Endpoint
from proxy.core.tasks import Tasks
from proxy.lab.sim import SimConfig, SimFleet, SimPod
from proxy.settings import Settings, from_mapping
from proxy.telemetry.metrics import SUPERVISOR, Catalogue, Dump, Merged
from proxy.telemetry.observation import expose
from tests.helpers.waiting import PATIENCE

CHAT = "/v1/chat/completions"

UNHURRIED: Mapping[str, Any] = {
    "timeouts": {"connect": "30s"},
    "health": {"timeout": "30s"},
    "drain": {"grace": "60s"},
}
"""No peer is given up because a busy machine is late."""


def configured(sim: SimFleet, **sections: Mapping[str, Any]) -> Settings:
    given: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "pods": {"static": [{"url": url, "name": f"pod-{index}"} for index, url in enumerate(sim.urls)]},
        "telemetry": {"accessLog": False, "logLevel": "error"},
        "reliability": UNHURRIED,
    }
    pods = {**given["pods"], **sections.pop("pods", {})}
    return from_mapping({**given, **sections, "pods": pods})


def question(text: str, tokens: int = 4, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the supervisor bounds is bounded generously: a worker has a CPU only when others leave it one."""
    for name in ("DECISIONS_TIMEOUT", "METRICS_TIMEOUT"):
        monkeypatch.setattr(reads, name, PATIENCE)
    for name in ("START_TIMEOUT", "RELOAD_TIMEOUT", "SILENT_AFTER", "KILL_SILENT_AFTER"):
        monkeypatch.setattr(workers, name, PATIENCE)


@dataclass
class Host:
    sim: SimFleet
    supervisor: Supervisor
    admin_http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.supervisor.port}"

    async def chat(self, text: str, tokens: int = 4) -> str:
        """Over a new connection, so that any worker may get it; the name of the pod that responded."""
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
        """As the supervisor has received it."""
        return sum(endpoint.load.requests for endpoint in self.supervisor.fleet.endpoints)


@asynccontextmanager
async def held(pods: Iterable[SimPod]) -> AsyncIterator[None]:
    """Their engines stand still: what they have begun does not end, however long it takes to hear of it elsewhere."""

    async def hold() -> None:
        while True:
            for pod in pods:
                assert pod._service is not None
                pod._service.driver.freeze(0.3)
            await asyncio.sleep(0.1)

    async with Tasks() as tasks:
        tasks.start(hold(), "hold of the engines")
        yield


async def until_workers_show(supervisor: Supervisor, condition: Callable[[set[str]], object]) -> None:
    """Wait until the condition holds for the lines of each worker's metrics."""
    ask_all = supervisor._workers.ask_all
    async with asyncio.timeout(PATIENCE):
        while not all([condition(await _lines(dump)) for _, dump in await ask_all(reads.METRICS, timeout=PATIENCE)]):
            await asyncio.sleep(0.02)


async def _lines(dump: Dump) -> set[str]:
    merged = Merged(Catalogue("test"))
    await merged.add(dump, SUPERVISOR)
    body, _ = await expose(merged, "")
    return set(body.decode().splitlines())


def state(pod: str, state: str) -> str:
    """The line that says it."""
    return f'kvlane_endpoint_state{{endpoint="{pod}",state="{state}"}} 1.0'


def ready_pods(number: int, pool: str = "default") -> str:
    return f'kvlane_pool_ready_endpoints{{pool="{pool}"}} {float(number)}'


@asynccontextmanager
async def host(
    workers: int,
    pods: int = 2,
    config: SimConfig | Sequence[SimConfig] | None = None,
    refresh: Any = None,
    **sections: Any,
) -> AsyncIterator[Host]:
    """`refresh` is the section of this name of the pods."""
    if refresh is not None:
        sections["pods"] = {"refresh": refresh}
    async with (
        SimFleet(pods, config or SimConfig(time_scale=20)) as sim,
        Supervisor(configured(sim, **sections), workers) as supervisor,
        aiohttp.ClientSession() as admin_http,
    ):
        await until_workers_show(supervisor, lambda lines: _known_ready(supervisor.fleet.ready) <= lines)
        yield Host(sim, supervisor, admin_http)


def _known_ready(ready: Iterable[Endpoint]) -> set[str]:
    """The lines of a worker that knows what the supervisor knows; news reach it some milliseconds later."""
    return {
        ready_pods(number, pool)
        for pool, number in Counter(pod.pool for pod in {endpoint.first_rank for endpoint in ready}).items()
    }
