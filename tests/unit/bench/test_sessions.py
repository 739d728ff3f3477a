"""Sessions stay with their pods, and no session overloads one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.placement.generators import generate
from bench.placement.scenario import Scenario
from proxy.config.load import load
from proxy.core.ports import ManualClock
from proxy.lab.kvlane import Kvlane
from proxy.lab.simulation import Gauges, Simulation, SimulationOutcome, VirtualPod
from proxy.lab.workload import Workload
from proxy.settings import Settings, from_mapping

PODS = Scenario(pods=4).configs()
EXAMPLE = load(Path(__file__).parents[3] / "config" / "sessions.yaml", {})
STICKY: dict[str, Any] = {
    "plugins": [
        {"type": "session-affinity-filter", "parameters": {"strategy": "session_id"}},
        {"type": "running-requests-size-scorer"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [{"pluginRef": "session-affinity-filter"}, {"pluginRef": "running-requests-size-scorer"}],
        }
    ],
}


def run(settings: Settings, workload: Workload) -> tuple[list[SimulationOutcome], Gauges]:
    clock, pods = ManualClock(), [VirtualPod(index, config) for index, config in enumerate(PODS)]
    policy = Kvlane(settings, pods, clock, Random(1), says_cached=True)
    simulation = Simulation(workload.jobs, pods, policy, clock, Random(1))
    return simulation.run(), simulation.gauges


def one_client_in_two(workload: Workload) -> Workload:
    """Half of the requests call themselves one session: what a client with a key per user, or per service, does."""
    jobs = [replace(job, session="all of it") if at % 2 else job for at, job in enumerate(workload.jobs)]
    return replace(workload, jobs=tuple(jobs))


@pytest.mark.parametrize("rate", [20.0, 30.0])
def test_one_busy_session_overloads_no_pod(rate: float) -> None:
    workload = one_client_in_two(generate("conversations", 1500, rate, Random(1)))
    _, balanced = run(EXAMPLE, workload)
    _, sticky = run(from_mapping({"scheduling": STICKY}), workload)
    assert sticky.imbalance > 3.0
    assert balanced.imbalance < 1.7


def test_an_exclusive_session_stays_with_its_cache() -> None:
    workload = generate("conversations", 1500, 30.0, Random(2))
    outcomes, gauges = run(EXAMPLE, workload)
    pods: dict[str, list[int]] = {}
    for outcome in outcomes:
        pods.setdefault(outcome.job.session, []).append(outcome.pod)
    turns = [(one, other) for visited in pods.values() for one, other in pairwise(visited)]
    assert sum(one != other for one, other in turns) < 0.02 * len(turns)
    assert gauges.imbalance < 1.5
