"""What a draining pod has is computed by few others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proxy.config.load import load
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest, Prompt
from proxy.fleet.bindings import steer
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.lab.kvlane import Kvlane
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import Simulation, VirtualPod
from proxy.lab.workload import Job, named
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH
from tests.helpers.plugins.situations import Foretold, Held, pod

BLOCKS = 100
"""Of a prompt; 16 tokens each."""


def request_of(held: Mapping[str, int], costs: Mapping[str, float] | None = None) -> InferenceRequest:
    request = InferenceRequest("id", "/v1/completions", "m", Prompt((bytes(BLOCKS * 64),)))
    request.state.write(PREFIX_MATCH, Held(BLOCKS, held))
    if costs is not None:
        request.state.write(LATENCY, Foretold(costs))
    return request


def leaving(name: str = "old") -> Endpoint:
    found = pod(name)
    update(found, state=EndpointState.DRAINING)
    return found


def steered(request: InferenceRequest, *pods: Endpoint) -> list[str]:
    """The candidates, with the decision for the first of them, while a pod called old drains."""
    decision = steer(request, Decision(pods[0], pods[1:], "p"), (leaving(),))
    assert decision.profile == "p"
    return [endpoint.name for endpoint in decision.candidates()]


def test_prefixes_of_a_draining_pod_go_to_the_pod_with_most_of_them() -> None:
    a, b, c = pod("a"), pod("b"), pod("c")
    assert steered(request_of({"old": 90, "b": 20, "c": 60}), a, b, c) == ["c", "a", "b"]


def test_other_prefixes_go_where_they_were_sent() -> None:
    a, b = pod("a"), pod("b")
    assert steered(request_of({"old": 90}), a, b) == ["a", "b"]
    assert steered(request_of({"b": 50}), a, b) == ["a", "b"]
    assert steered(request_of({"old": 20, "a": 20, "b": 90}), a, b) == ["a", "b"]
    assert steered(InferenceRequest("id", "/", "m"), a, b) == ["a", "b"]


@pytest.mark.parametrize(
    ("busier", "goes_to"),
    [({"tokens": 2500}, "b"), ({"tokens": 2600}, "a"), ({"running": 5}, "b"), ({"running": 6}, "a")],
)
def test_a_pod_with_too_much_load_is_not_chosen(busier: dict[str, Any], goes_to: str) -> None:
    assert steered(request_of({"old": 90, "b": 80}), pod("a"), pod("b", **busier))[0] == goes_to


@pytest.mark.parametrize(("cost", "goes_to"), [(0.12, "b"), (0.14, "a")])
def test_with_predictions_the_comparison_is_in_seconds(cost: float, goes_to: str) -> None:
    request = request_of({"old": 90, "b": 80}, {"a": 0.0, "b": cost})
    assert steered(request, pod("a"), pod("b", running=500))[0] == goes_to


def test_a_fleet_knows_its_draining_pods() -> None:
    fleet = Fleet(ManualClock(), grace=0.0)
    a, b = (fleet.add(PodSettings(url=f"http://{name}", name=name)) for name in "ab")
    assert not list(fleet.draining)
    fleet.drain("a")
    assert list(fleet.draining) == [a]
    b.charge(1, 0)
    fleet.remove("b")
    fleet.undrain("a")
    assert b not in fleet.draining
    assert not list(fleet.draining)


DOCUMENTS, QUESTIONS = 12, 8
CONFIG = Path(__file__).parents[3] / "config"


def computed(config: str, seed: int, *, steers: bool) -> tuple[int, float]:
    """How many pods computed a document that the drained pod had, over all documents, and the mean time to first token.
    The questions about all documents come within four seconds, after the pod that had all of them was drained."""
    rng = Random(seed)
    first = [Job(2.0 * at, 4_096, 5, _document(at)) for at in range(DOCUMENTS)]
    questions = [(at, 10_000 + 100 * at + number) for at in range(DOCUMENTS) for number in range(QUESTIONS)]
    later = [Job(100.0 + 4.0 * rng.random(), 4_608, 40, (*_document(at), question)) for at, question in questions]
    clock = ManualClock()
    pods = [VirtualPod(index, SimConfig()) for index in range(4)]
    policy = Kvlane(load(CONFIG / config, {}), pods, clock, Random(seed), says_cached=True)
    fleet = policy.fleet

    class Drained(Simulation):
        def _arrive(self, index: int) -> None:
            for number, endpoint in enumerate(fleet.endpoints):
                drains = (number == 0) == (index >= DOCUMENTS)
                (fleet.drain if drains else fleet.undrain)(endpoint.name)
            if not steers:
                fleet.draining = ()
            super()._arrive(index)

    outcomes = Drained(named([*first, *later]), pods, policy, clock, Random(seed)).run()
    assert {outcome.pod for outcome in outcomes[:DOCUMENTS]} == {0}
    repeated = outcomes[DOCUMENTS:]
    waits = [outcome.first_token - outcome.job.arrival for outcome in repeated if outcome.first_token is not None]
    assert len(waits) == DOCUMENTS * QUESTIONS
    return len({(outcome.pod, outcome.job.ids[1]) for outcome in repeated}), sum(waits) / len(waits)


@pytest.mark.parametrize("config", ["prefix-aware.yaml", "latency.yaml"])
def test_documents_of_a_drained_pod_are_computed_on_fewer_pods_without_delay(config: str) -> None:
    seeds = range(1, 9)
    steered, left = ([computed(config, seed, steers=steers) for seed in seeds] for steers in (True, False))
    again, again_without = (sum(pods - DOCUMENTS for pods, _ in runs) for runs in (steered, left))
    assert again <= 0.55 * again_without, "documents computed on more than one pod"
    assert sum(wait for _, wait in steered) <= 1.05 * sum(wait for _, wait in left)


def _document(number: int) -> tuple[int, ...]:
    """Under a system prompt that all of them share."""
    return (1, *range(100 * (number + 1), 100 * (number + 1) + 7))
