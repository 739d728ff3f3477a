"""What one viewer of the dashboard costs the proxy: CPU time per picture; there is one per second.

    python bench/dashboard.py [--pods 500] [--rate 1000] [--pictures 40] [--json]

A real fleet, prefix index and admin port; a viewer in another process reads /dashboard/events as a browser does.
Between two pictures happens what happens in a second: a twentieth of the pods has been scraped, and `--rate` requests
have come, got responses and been counted. What that costs is not the dashboard's, and is taken off, as is what the
event loop costs without a viewer. Pictures are made ten times as often as in service, so that two minutes are enough.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import InstanceName, SystemClock
from proxy.core.state import PluginState
from proxy.dashboard.dashboard import Dashboard, of_process
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.http.admin import AdminServer, admin_application
from proxy.http.settings import AdminSettings
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Exposition

INTERVAL = 0.1
SCRAPED = 0.05
"""Of the pods, in a second: with the limit of 5 % of a core, a large fleet is scraped every 10 to 20 s."""

DOCUMENTS, BLOCKS, CAPACITY = 200, 60, 100_000
ROUNDS = 3

VIEWER = """
import http.client, sys
c = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
c.request("GET", "/dashboard/events")
a = c.getresponse()
while a.fp.readline():
    pass
"""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of CPU per picture: the median of the rounds, and the least and the most."""

    load: str
    milliseconds: float
    least: float
    most: float


@dataclass
class Life:
    """What happens to the pods."""

    catalogue: Catalogue
    fleet: Fleet
    counts: EndpointSeries
    producer: ApproxPrefixCacheProducer
    clock: SystemClock = field(default_factory=SystemClock)
    rng: Random = field(default_factory=lambda: Random(1))

    def second(self, pods: list[Endpoint], rate: int) -> None:
        for pod in self.rng.sample(pods, round(SCRAPED * len(pods))):
            fresh = Metrics(scraped_at=self.clock.now(), freshness=Freshness.FRESH, block_size=16, blocks=8192)
            pod.publish(replace(fresh, kv_usage=self.rng.random(), running=pod.load.requests), pod.load.requests)
        cells = self.catalogue
        for number in range(rate):
            pod = self.rng.choice(pods)
            pod.charge(1 if pod.load.requests < 3 else -1, 0)
            attempts = self.counts.of(pod).attempts
            attempts["complete"] = attempts.get("complete", 0) + 1
            for histogram in (cells.ttft.cell("m", "true"), cells.tpot.cell("m"), cells.e2e.cell("m")):
                histogram.observe(self.rng.random())
            cells.requests.cell("m", "chat", "complete", "2xx").add()
            document = self.rng.randrange(DOCUMENTS)
            chain = [document * 1000 + block + 1 for block in range(BLOCKS)] + [self.rng.getrandbits(60), number]
            index, target = self.producer.index, pods[(document + number % 3) % len(pods)]
            index.confirm(index.reserve([chain], target, CAPACITY))


def main() -> None:
    options = _options()
    costs = uvloop.run(_measure(options.pods, options.rate, options.pictures))
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    for cost in costs:
        share = f"{cost.milliseconds / 10:.2f} % of a core"
        print(f"{cost.load:<18} {cost.milliseconds:5.1f} ms a picture ({cost.least:.1f} to {cost.most:.1f}): {share}")


async def _measure(pods: int, rate: int, pictures: int) -> list[Cost]:
    clock, catalogue = SystemClock(), Catalogue("bench")
    fleet = Fleet(clock)
    endpoints = EndpointSeries(catalogue, fleet, clock)
    producer = ApproxPrefixCacheProducer(InstanceName("approx-prefix-cache-producer"), clock, PluginState())
    life = Life(catalogue, fleet, endpoints, producer)
    scheduling: Any = SimpleNamespace(plugins=lambda kind: [producer] if isinstance(producer, kind) else [])
    dashboard = Dashboard(
        fleet,
        clock,
        lambda endpoint: endpoints.of(endpoint).attempts,
        lambda endpoint: "closed",
        of_process(catalogue),
        dict,
        dict,
        lambda: {"default": scheduling},
        dict,
        interval=INTERVAL,
    )
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        application = admin_application(
            fleet=fleet,
            exposition=Exposition(catalogue, endpoints),
            config=dict,
            session=session,
            stopping=lambda: False,
            keys=lambda: (None, None),
            hosts=tuple,
            configurations=None,  # type: ignore[arg-type]  # not requested
            dashboard=dashboard,
        )
        admin = await stack.enter_async_context(AdminServer(AdminSettings(port=0), application))
        await dashboard.start(stack)
        known = [fleet.add(PodSettings(url=f"http://{number}.test", name=f"pod-{number}")) for number in range(pods)]
        for pod in known:
            fleet.reached(pod)
        loads = (("idle", 0), (f"{rate} requests/s", rate))
        return [await _cost(name, number, life, known, admin.port, pictures) for name, number in loads]


async def _cost(load: str, rate: int, life: Life, pods: list[Endpoint], port: int, pictures: int) -> Cost:
    """With a viewer against without, by turns."""
    found = []
    for _ in range(ROUNDS):
        alone = await _window(life, pods, rate, pictures)
        viewer = await asyncio.create_subprocess_exec(sys.executable, "-c", VIEWER, str(port))
        try:
            await asyncio.sleep(1.5)
            watched = await _window(life, pods, rate, pictures)
        finally:
            viewer.terminate()
            await viewer.wait()
        await asyncio.sleep(5 * INTERVAL)
        found.append(1000 * (watched - alone))
    return Cost(load, statistics.median(found), min(found), max(found))


async def _window(life: Life, pods: list[Endpoint], rate: int, pictures: int) -> float:
    """Seconds of CPU per interval, without the seconds that the traffic takes."""
    began, lived = time.process_time(), 0.0
    for _ in range(pictures):
        before = time.process_time()
        life.second(pods, rate)
        lived += time.process_time() - before
        await asyncio.sleep(INTERVAL)
    return (time.process_time() - began - lived) / pictures


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
