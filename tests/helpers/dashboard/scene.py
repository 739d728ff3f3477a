"""The dashboard at a real admin port, before pods that are as a test says and are never asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import SystemClock
from proxy.dashboard.dashboard import Dashboard, of_process
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.http.admin import AdminServer, admin_application
from proxy.http.settings import AdminSettings
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Exposition
from tests.helpers.http.admin.fakes import Fixed

ABOUT = {
    "config": {"number": 1, "sha256": "0", "origin": "start", "since": 0, "needsRestart": [], "rollsBackTo": None},
    "workers": 1,
    "stopping": False,
}


@dataclass
class Scene:
    """`breakers` has the states of breakers that are not closed."""

    clock: SystemClock
    fleet: Fleet
    catalogue: Catalogue
    endpoints: EndpointSeries
    breakers: dict[Endpoint, str] = field(default_factory=dict)
    url: str = ""

    def add(self, name: str, pool: str = "default", role: str = "", **metrics: Any) -> Endpoint:
        """A pod that was scraped just now."""
        endpoint = self.fleet.add(PodSettings(url=f"http://{name}:8000", name=name, role=role), pool=pool)
        self.report(endpoint, **metrics)
        self.fleet.reached(endpoint)
        return endpoint

    def report(self, endpoint: Endpoint, **metrics: Any) -> None:
        fresh = Metrics(scraped_at=self.clock.now(), freshness=Freshness.FRESH, block_size=16, blocks=8192)
        endpoint.publish(replace(fresh, **metrics), 0)

    def reply(self, seconds: float, number: int = 1) -> None:
        """So many requests whose first tokens took so long."""
        for _ in range(number):
            self.catalogue.ttft.cell("m", "true").observe(seconds)
            self.catalogue.requests.cell("m", "chat", "complete", "2xx").add()


@asynccontextmanager
async def scene(pods: int = 0, api_key: str | None = None) -> AsyncIterator[Scene]:
    clock, catalogue = SystemClock(), Catalogue("test")
    fleet = Fleet(clock)
    fleet.form(("default", "other"))
    endpoints = EndpointSeries(catalogue, fleet, clock)
    made = Scene(clock, fleet, catalogue, endpoints)
    dashboard = Dashboard(
        fleet,
        clock,
        lambda endpoint: endpoints.of(endpoint).attempts,
        lambda endpoint: made.breakers.get(endpoint, "closed"),
        of_process(catalogue),
        dict,
        lambda: ABOUT,
        dict,
        dict,
    )
    async with AsyncExitStack() as stack:
        application = admin_application(
            fleet=fleet,
            exposition=Exposition(catalogue, endpoints),
            config=dict,
            session=await stack.enter_async_context(aiohttp.ClientSession()),
            stopping=lambda: False,
            keys=lambda: (api_key, None),
            hosts=tuple,
            configurations=Fixed(),
            breaker=lambda endpoint: made.breakers.get(endpoint, "closed"),
            dashboard=dashboard,
        )
        admin = await stack.enter_async_context(AdminServer(AdminSettings(port=0), application))
        made.url = f"http://127.0.0.1:{admin.port}"
        await dashboard.start(stack)
        for number in range(pods):
            made.add(f"vllm-{number}", running=number % 7, kv_usage=(number * 37 % 90) / 100)
        yield made


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """Name and data of each."""
    name = ""
    async for line in reply.content:
        head, _, rest = line.decode().rstrip("\n").partition(": ")
        if head == "event":
            name = rest
        elif head == "data":
            yield name, orjson.loads(rest)
