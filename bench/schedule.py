"""Microseconds of one `schedule()` with the default profile: python bench/schedule.py [--json]"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, Metrics
from proxy.core.ports import Clock, Random, SystemClock
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest, Prompt
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read

AIMS = {4: 12.0, 10: 30.0, 100: 250.0, 1000: 2500.0}
PROMPT_TOKENS = 2000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--seconds", type=float, default=1.0, help="per fleet size")
    options = arguments.parse_args()
    results = {pods: measure(pods, options.seconds) for pods in AIMS}
    if options.json:
        print(json.dumps({"microseconds": results, "aims": AIMS}))
        return
    print(f"{'pods':>6} {'schedule() us':>14} {'aim':>6}")
    for pods, microseconds in results.items():
        print(f"{pods:>6} {microseconds:>14.1f} {AIMS[pods]:>6.0f}")


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


def _endpoint(index: int, draw: random.Random) -> Endpoint:
    metrics = Metrics(
        waiting=draw.choice((0, 0, 0, 1, 5)),
        running=draw.randrange(20),
        kv_usage=draw.random(),
        freshness=Freshness.FRESH,
    )
    load = Load(requests=draw.randrange(20), tokens=draw.randrange(10_000), recent=draw.random())
    return Endpoint(f"pod-{index}", state=EndpointState.READY, metrics=metrics, load=load)


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
