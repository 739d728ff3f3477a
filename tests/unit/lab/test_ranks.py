"""Pods with data-parallel ranks on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest

from bench.placement.engines import VLLM
from bench.placement.lockstep import LockstepGroup, RankEngine
from bench.placement.pods import virtual_fleet
from bench.placement.policy import EngineBalancer
from bench.placement.report import PrefillGauges
from proxy.core.ports import ManualClock
from proxy.lab.kvlane import Kvlane
from proxy.lab.sim import SimConfig, SimEngine, StepTiming
from proxy.lab.simulation import Restart, Simulation, SimulationOutcome
from proxy.lab.workload import Job, named
from proxy.settings import Settings
from tests.helpers.bench.support import Replayed, crowd, sequence
from tests.helpers.lab.traffic import conversations

Times = dict[int, tuple[float, float]]
"""When each request had its first token, and its last."""


def counted(jobs: Sequence[Job], config: SimConfig, ranks: int) -> Times:
    """Requests take turns on the ranks, which are in lockstep."""
    engines = [RankEngine(config) for _ in range(ranks)]
    lockstep = LockstepGroup(engines)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    queue = list(enumerate(jobs))
    while queue or lockstep.until < math.inf:
        if queue and queue[0][1].arrival < lockstep.until:
            index, job = queue.pop(0)
            engines[index % ranks].submit(sequence(index, job), job.arrival)
            continue
        now = lockstep.until
        for event in lockstep.finish():
            if event.first:
                first[event.sequence.index] = now
            if event.last:
                last[event.sequence.index] = now
    return {index: (first[index], last[index]) for index in first}


def played(jobs: Sequence[Job], config: SimConfig, ranks: int) -> Times:
    """The same by the engines of `kvlane sim`, one step after the other."""
    engines: list[SimEngine] = [SimEngine(config) for _ in range(ranks)]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    queue, now = list(enumerate(jobs)), 0.0
    while queue or any(engine.busy for engine in engines):
        if not any(engine.busy for engine in engines):
            now = max(now, queue[0][1].arrival)
        while queue and queue[0][1].arrival <= now:
            index, job = queue.pop(0)
            replayed: object = Replayed(index, job, config.block_size)
            engines[index % ranks].submit(replayed, job.arrival)  # type: ignore[arg-type]
        steps = [(engine, engine.start_step(now)) for engine in engines if engine.busy]
        now += max(step.duration for _, step in steps)
        for engine, step in steps:
            for output in engine.finish_step(step, now):
                index = output.sequence.index  # type: ignore[attr-defined]
                first.setdefault(index, now)
                if output.finish:
                    last[index] = now
    return {index: (first[index], last[index]) for index in first}


@pytest.mark.parametrize("seed", range(12))
def test_counted_ranks_in_lockstep_step_as_played_ones(seed: int) -> None:
    jobs, config = crowd(Random(seed))
    found, expected = counted(jobs, config, 3), played(jobs, config, 3)
    assert found.keys() == expected.keys() == set(range(len(jobs)))
    for index, times in expected.items():
        assert found[index] == pytest.approx(times, abs=1e-6)


def run(config: SimConfig, jobs: Sequence[Job], *restarts: Restart) -> list[SimulationOutcome]:
    fleet = virtual_fleet([config], VLLM)
    return Simulation(jobs, fleet, EngineBalancer(fleet, Random(1)), ManualClock(), Random(2), restarts).run()


def test_the_internal_balancer_spreads_a_burst_over_all_ranks() -> None:
    jobs = named([Job(0.0, 1_000, 10, (index, index)) for index in range(8)])
    outcomes = run(SimConfig(data_parallel_size=8), jobs)
    assert sorted(one.pod for one in outcomes) == list(range(8))


@pytest.mark.parametrize("lockstep", [False, True])
def test_every_rank_has_its_own_cache(lockstep: bool) -> None:
    jobs = named([Job(10.0 * index, 1_000, 10, (1, 2)) for index in range(3)])
    config = SimConfig(data_parallel_size=2, lockstep=lockstep)
    fleet = virtual_fleet([config], VLLM)

    class Alternating(EngineBalancer):
        def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
            return [0, 1, 0][int(now / 10)]

    outcomes = Simulation(jobs, fleet, Alternating(fleet, Random(1)), ManualClock(), Random(2)).run()
    assert [one.cached_tokens for one in outcomes] == [0, 0, 992]


def test_in_lockstep_a_prefill_on_one_rank_delays_the_response_on_another() -> None:
    timing = StepTiming(base=0.01, per_prefill_token=0.001, per_sequence=0.0)
    jobs = named([Job(0.0, 10, 100, (1,)), Job(0.3, 2_000, 1, (2, 3, 4, 5))])
    alone, together = (
        run(SimConfig(data_parallel_size=2, lockstep=lockstep, timing=timing), jobs)[0].ended
        for lockstep in (False, True)
    )
    assert alone is not None
    assert together == pytest.approx(alone + 2.0, abs=0.05)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_crashed_pod_takes_all_its_ranks_with_it(lockstep: bool) -> None:
    config = SimConfig(data_parallel_size=4, lockstep=lockstep)
    jobs = named([*(Job(0.0, 100, 1_000, (index,)) for index in range(4)), Job(4.0, 100, 5, (9,))])
    *lost, later = run(config, jobs, Restart(0, at=1.0, down=2.0))
    assert [one.ended for one in lost] == [None] * 4
    assert later.ended is not None


def test_prefill_work_is_compared_between_ranks() -> None:
    jobs = conversations(40, 4.0).jobs
    fleet = virtual_fleet([SimConfig(data_parallel_size=2)], VLLM)

    class OnOne(EngineBalancer):
        def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
            return 0

    gauges = PrefillGauges()
    Simulation(jobs, fleet, OnOne(fleet, Random(1)), ManualClock(), Random(2), gauges=gauges).run()
    assert gauges.prefill_skew == 2.0


def served(config: SimConfig, pods: int = 1) -> tuple[list[SimulationOutcome], Kvlane]:
    jobs = conversations(400, 12.0).jobs
    fleet, clock = virtual_fleet([config] * pods, VLLM), ManualClock()
    policy = Kvlane(Settings(), fleet, clock, Random(1), says_cached=True)
    return Simulation(jobs, fleet, policy, clock, Random(2)).run(), policy


def hit_rate(outcomes: Sequence[SimulationOutcome]) -> float:
    return sum(one.cached_tokens for one in outcomes) / sum(one.job.prompt_tokens for one in outcomes)


def test_kvlane_places_on_the_ranks_of_one_pod_as_on_pods() -> None:
    on_ranks, policy = served(SimConfig(data_parallel_size=8))
    on_pods, _ = served(SimConfig(), pods=8)
    assert {one.pod for one in on_ranks} == set(range(8))
    assert hit_rate(on_ranks) >= 0.95 * hit_rate(on_pods)
    assert policy.ledger.in_flight == 0


def test_kvlane_finds_more_prefixes_than_the_internal_balancer() -> None:
    config = SimConfig(data_parallel_size=8)
    ours, _ = served(config)
    theirs = run(config, conversations(400, 12.0).jobs)
    assert hit_rate(ours) > 1.2 * hit_rate(theirs)
