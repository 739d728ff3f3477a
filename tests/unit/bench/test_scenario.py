from __future__ import annotations

from random import Random

import pytest

from bench.placement import policies
from bench.placement.capacity import capacity
from bench.placement.engines import ENGINES
from bench.placement.generators import generate
from bench.placement.scenario import Scenario
from proxy.core.ports import ManualClock
from proxy.lab.sim.config import HARDWARE
from proxy.lab.simulation import Simulation


def test_kinds_of_hardware_alternate() -> None:
    configs = Scenario(pods=4, hardware="a100-llama-3.1-8b+h100-llama-3.1-8b", slow_pod=2.0).configs()
    assert [config.timing for config in configs[:2]] == [config.timing for config in configs[2:]]
    assert configs[0].timing == HARDWARE["a100-llama-3.1-8b"].timing
    assert configs[1].timing == HARDWARE["h100-llama-3.1-8b"].timing
    assert [config.slowdown for config in configs] == [2.0, 1.0, 1.0, 1.0]


def test_a_request_that_fits_the_smallest_pod_fits_all() -> None:
    mixed = Scenario(pods=2, hardware="generic-8b+h100-tp4-llama-3.3-70b")
    assert mixed.context_length == min(config.context_length for config in mixed.configs())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["default", "llm-d", "dynamo", "oracle"])
def test_every_engine_completes_requests_of_every_router(engine: str, policy: str) -> None:
    scenario = Scenario(pods=3, engine=engine, restart_at=3.0)
    workload = generate("conversations", 150, 20.0, Random(1))
    pods, clock = scenario.fleet(), ManualClock()
    router = policies.make(policy, pods, clock, Random(1), says_cached=True)
    outcomes = Simulation(workload.jobs, pods, router, clock, Random(1), scenario.restarts).run()
    completed = [outcome for outcome in outcomes if outcome.ended is not None]
    assert len(completed) > 0.8 * len(outcomes)
    assert sum(outcome.cached_tokens for outcome in completed) > 0


def test_twice_the_foreign_pods_have_twice_the_capacity() -> None:
    jobs = generate("bimodal", 400, 20.0, Random(4)).jobs
    few, many = (capacity(jobs, Scenario(pods=pods, engine="llm-d-sim").fleet()) for pods in (2, 4))
    assert many == pytest.approx(2 * few, rel=0.15)
