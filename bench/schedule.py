"""Microseconds of one `schedule()` with the default profile: python bench/schedule.py [--json] [--ranks]

`--ranks` compares 4 pods of 8 data-parallel ranks with 32 pods: a decision, and reading the metrics of the fleet once.
The two take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, Metrics, join_ranks
from proxy.core.ports import Clock, Random, SystemClock
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest, Prompt
from proxy.fleet.dialects import DIALECTS
from proxy.fleet.scrape import parse_ranks
from proxy.lab.sim import SimConfig, SimEngine
from proxy.lab.sim.metrics import expose
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read

AIMS = {4: 12.0, 10: 30.0, 100: 250.0, 1000: 2500.0}
PROMPT_TOKENS = 2000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--seconds", type=float, default=1.0, help="per fleet size")
    arguments.add_argument("--ranks", action="store_true", help="4 pods of 8 ranks against 32 pods")
    options = arguments.parse_args()
    if options.ranks:
        _compare_ranks(options.seconds)
        return
    results = {pods: measure(pods, options.seconds) for pods in AIMS}
    if options.json:
        print(json.dumps({"microseconds": results, "aims": AIMS}))
        return
    print(f"{'pods':>6} {'schedule() us':>14} {'aim':>6}")
    for pods, microseconds in results.items():
        print(f"{pods:>6} {microseconds:>14.1f} {AIMS[pods]:>6.0f}")


RANKED_PODS, RANKS = 4, 8


def _compare_ranks(seconds: float) -> None:
    decisions = _turns([_decision(RANKED_PODS, RANKS), _decision(RANKED_PODS * RANKS, 1)], seconds)
    scrapes = _turns([_scrapes(RANKED_PODS, RANKS), _scrapes(RANKED_PODS * RANKS, 1)], seconds)
    print(f"{'':>24} {f'{RANKED_PODS} pods of {RANKS} ranks':>18} {f'{RANKED_PODS * RANKS} pods':>9} {'ratio':>6}")
    for what, (ranks, pods) in (("schedule() us", decisions), ("metrics of the fleet us", scrapes)):
        print(f"{what:>24} {ranks:>18.1f} {pods:>9.1f} {ranks / pods:>6.2f}")


def _turns(works: list[Callable[[], None]], seconds: float) -> list[float]:
    """Return the least microseconds of each: what other programs add is left out."""
    samples: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for work, found in zip(works, samples, strict=True):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return [min(found) * 1e6 for found in samples]


def _decision(pods: int, ranks: int) -> Callable[[], None]:
    draw = random.Random(1)
    scheduling = build(read(None), Registry.discover(), {Clock: SystemClock(), Random: draw})
    endpoints = [_endpoint(index, draw, index % ranks if ranks > 1 else None) for index in range(pods * ranks)]
    for pod in range(pods if ranks > 1 else 0):
        join_ranks(endpoints[pod * ranks : (pod + 1) * ranks])
    request, everybody = _request(scheduling, endpoints), tuple(endpoints)
    return lambda: void(scheduling.scheduler.schedule(request, everybody))


def _scrapes(pods: int, ranks: int) -> Callable[[], None]:
    text = expose([SimEngine(SimConfig(), rank=rank) for rank in range(ranks)], 0.0, 0.0).encode()

    def read_all() -> None:
        for _ in range(pods):
            parse_ranks(text, DIALECTS["vllm"])

    return read_all


def void(result: object) -> None:
    """Take a result that is not needed."""


def measure(pods: int, seconds: float) -> float:
    """The median over batches, with a fleet under mixed load and a prompt that no pod has cached."""
    draw = random.Random(1)
    scheduling = build(read(None), Registry.discover(), {Clock: SystemClock(), Random: draw})
    endpoints = [_endpoint(index, draw) for index in range(pods)]
    request = _request(scheduling, endpoints)
    schedule = scheduling.scheduler.schedule
    batch = max(1, 2000 // pods)
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        for _ in range(batch):
            schedule(request, endpoints)
        samples.append((time.perf_counter() - started) / batch)
    return statistics.median(samples) * 1e6


def _endpoint(index: int, draw: random.Random, rank: int | None = None) -> Endpoint:
    metrics = Metrics(
        waiting=draw.choice((0, 0, 0, 1, 5)),
        running=draw.randrange(20),
        kv_usage=draw.random(),
        freshness=Freshness.FRESH,
    )
    load = Load(requests=draw.randrange(20), tokens=draw.randrange(10_000), recent=draw.random())
    return Endpoint(f"pod-{index}", rank=rank, state=EndpointState.READY, metrics=metrics, load=load)


def _request(scheduling: Scheduling, endpoints: list[Endpoint]) -> InferenceRequest:
    prompt = Prompt((random.Random(2).randbytes(4 * PROMPT_TOKENS),))
    request = InferenceRequest("bench", "/v1/completions", "model", prompt)

    async def produce() -> None:
        for producer in scheduling.producers:
            await producer.produce(request, endpoints)

    asyncio.run(produce())
    return request


if __name__ == "__main__":
    main()
