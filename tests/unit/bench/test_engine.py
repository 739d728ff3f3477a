"""The counting engine does what the engine of the simulated pods does, at the same times."""

from __future__ import annotations

import math
from dataclasses import astuple
from random import Random

import pytest

from proxy.lab.engine import CountingEngine
from proxy.lab.sim import SimConfig, StepTiming
from proxy.lab.workload import Job, named
from tests.helpers.bench.support import counted, crowd, played, sequence


@pytest.mark.parametrize("seed", range(150))
def test_every_request_has_the_times_of_the_stepwise_engine(seed: int) -> None:
    jobs, config = crowd(Random(seed))
    expected, totals = played(jobs, config)
    found, counts = counted(jobs, config)
    assert counts == totals
    assert [astuple(fate) for fate in found] == [pytest.approx(astuple(fate), abs=1e-6) for fate in expected]


def test_the_test_load_preempts_evicts_and_shares() -> None:
    runs = [counted(*crowd(Random(seed))) for seed in range(60)]
    assert sum(totals.preemptions for _, totals in runs) > 50
    assert sum(totals.evictions for _, totals in runs) > 1_000
    assert sum(fate.cached_tokens > 0 for fates, _ in runs for fate in fates) > 500


def test_steps_that_only_decode_are_merged() -> None:
    (job,) = named([Job(0.0, 100, 200, (1,))])
    engine = CountingEngine(SimConfig())
    engine.submit(sequence(0, job), 0.0)
    calls = 0
    while engine.busy:
        engine.finish()
        calls += 1
    assert engine.steps == 200
    assert calls == 2


def test_a_new_request_waits_for_the_current_step_only() -> None:
    first, second = named([Job(0.0, 16, 200, (1,)), Job(0.35, 16, 1, (2,))])
    engine = CountingEngine(SimConfig(timing=StepTiming(base=0.1, per_prefill_token=0.0, per_sequence=0.0)))
    engine.submit(sequence(0, first), 0.0)
    engine.finish()
    engine.submit(sequence(1, second), second.arrival)
    assert engine.until == pytest.approx(0.4)
    engine.finish()
    assert engine.until == pytest.approx(0.5)
    assert [event.sequence.index for event in engine.finish()] == [1]


def test_blocks_in_use_are_known_at_every_time() -> None:
    (job,) = named([Job(0.0, 16, 100, (1,))])
    engine = CountingEngine(SimConfig(timing=StepTiming(base=1.0, per_prefill_token=0.0, per_sequence=0.0)))
    engine.submit(sequence(0, job), 0.0)
    assert engine.used_at(0.5) == 1
    engine.finish()
    assert [engine.used_at(at) for at in (1.5, 16.5, 17.5, 33.5)] == [2, 2, 3, 4]


def test_noise_changes_the_times_and_the_same_seed_repeats_them() -> None:
    jobs, config = crowd(Random(3))

    def ends(noise: float, seed: int) -> list[float]:
        noisy = SimConfig(num_gpu_blocks=config.num_gpu_blocks, noise=noise, noise_seed=seed)
        return [fate.ended for fate in counted(jobs, noisy)[0]]

    assert ends(0.3, 1) == ends(0.3, 1)
    assert ends(0.3, 1) != ends(0.3, 2)
    assert ends(0.3, 1) != ends(0.0, 1)


def test_an_engine_without_requests_has_no_next_event() -> None:
    engine = CountingEngine(SimConfig())
    assert engine.until == math.inf
    assert not engine.busy


def test_a_request_too_large_for_every_pod_is_an_error() -> None:
    (job,) = named([Job(0.0, 5_000, 1, tuple(range(10)))])
    engine = CountingEngine(SimConfig(num_gpu_blocks=100))
    with pytest.raises(RuntimeError, match="more blocks"):
        run_alone(engine, job)


def run_alone(engine: CountingEngine, job: Job) -> None:
    engine.submit(sequence(0, job), 0.0)
    while engine.busy:
        engine.finish()
