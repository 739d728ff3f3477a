"""The foreign engine follows its formulas, and its oracle predicts it exactly."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bench.placement.foreign import ForeignEngine, ForeignTiming
from proxy.lab.sim import SimConfig
from proxy.lab.workload import CHUNK, Job, named
from tests.helpers.bench.support import play, sequence

EXACT = ForeignTiming(deviation=0.0)


def played(jobs: tuple[Job, ...], config: SimConfig, timing: ForeignTiming = EXACT) -> list[tuple[float, float, int]]:
    """Of each request: its first token, its last, and the tokens it found."""
    sequences, first, last = play(ForeignEngine(config, timing), jobs)
    return [(first[one.index], last[one.index], one.cached) for one in sequences]


def test_a_single_request_takes_the_time_of_the_formula() -> None:
    jobs = named([Job(1.0, 1_000, 101, (1, 2))])
    ((first, last, cached),) = played(jobs, SimConfig())
    assert [first, last] == pytest.approx([1.0 + 0.03 + 0.25, 1.28 + 100 * 0.012])
    assert cached == 0


def test_each_concurrent_request_slows_the_others() -> None:
    jobs = named([Job(0.0, 1_000, 101, (1, 2)), Job(0.0, 1_000, 101, (3, 4))])
    alone, shared = 0.28, 0.28 * (1 + 1 / 15)
    (one, other) = played(jobs, SimConfig())
    assert [one[0], other[0]] == pytest.approx([alone, shared])
    assert one[1] == pytest.approx(alone + 100 * 0.012 * (1 + 1 / 15))
    left = 100 - (one[1] - shared) / (0.012 * (1 + 1 / 15))
    assert other[1] == pytest.approx(one[1] + left * 0.012)


def test_a_repeated_prompt_costs_its_new_part() -> None:
    jobs = named([Job(0.0, 1_024, 1, (1, 2)), Job(10.0, 1_536, 1, (1, 2, 3))])
    (_, (first, _, cached)) = played(jobs, SimConfig())
    assert first == pytest.approx(10.0 + 0.03 + 512 * 0.000_25)
    assert cached == 1_024


def test_requests_beyond_the_maximum_wait_for_a_slot() -> None:
    timing = replace(EXACT, most=1)
    jobs = named([Job(0.0, 100, 11, (1,)), Job(0.0, 100, 1, (2,))])
    (one, other) = played(jobs, SimConfig(), timing)
    assert other[0] == pytest.approx(one[1] + 0.055)


def test_a_request_without_enough_free_blocks_waits() -> None:
    jobs = named([Job(0.0, 1_024, 11, (1, 2)), Job(0.0, 1_024, 1, (3, 4))])
    (one, other) = played(jobs, SimConfig(num_gpu_blocks=100))
    assert other[0] > one[1]


def test_a_request_too_large_for_every_pod_is_an_error() -> None:
    (job,) = named([Job(0.0, 1_024, 1, (1, 2))])
    with pytest.raises(RuntimeError, match="more blocks"):
        ForeignEngine(SimConfig(num_gpu_blocks=10)).submit(sequence(0, job), 0.0)


def test_times_deviate_around_the_mean_and_the_same_seed_repeats_them() -> None:
    jobs = named([Job(10.0 * at, 200, 1, (at,)) for at in range(300)])

    def waits(seed: int) -> list[float]:
        found = played(jobs, SimConfig(noise_seed=seed), ForeignTiming(deviation=0.01))
        return [first - job.arrival for job, (first, _, _) in zip(jobs, found, strict=True)]

    assert waits(1) == waits(1) != waits(2)
    assert sum(waits(1)) / 300 == pytest.approx(0.08, rel=0.05)
    assert min(waits(1)) >= 0.3 * 0.08


def test_a_slow_pod_takes_proportionally_longer() -> None:
    jobs = named([Job(0.0, 1_000, 101, (1, 2))])
    ((first, last, _),) = played(jobs, SimConfig())
    ((slow_first, slow_last, _),) = played(jobs, SimConfig(slowdown=3.0))
    assert [slow_first, slow_last] == pytest.approx([3 * first, 3 * last])


@pytest.mark.parametrize("seed", range(40))
def test_the_predicted_time_of_the_last_request_is_its_time(seed: int) -> None:
    rng = Random(seed)
    now, jobs = 0.0, []
    for at in range(rng.choice([3, 20, 50])):
        now += rng.expovariate(rng.choice([5.0, 30.0]))
        ids = (rng.randint(0, 2), 100 + at)
        jobs.append(Job(now, CHUNK + rng.randint(1, CHUNK), rng.randint(1, 200), ids))
    known = named(jobs)
    engine = ForeignEngine(SimConfig(), EXACT)
    for index, job in enumerate(known[:-1]):
        while engine.until <= job.arrival:
            engine.finish()
        engine.submit(sequence(index, job), job.arrival)
    while engine.until <= known[-1].arrival:
        engine.finish()
    foreseen, cached = engine.foresee(sequence(len(known) - 1, known[-1]), known[-1].arrival)
    first, _, found = played(known, SimConfig())[-1]
    assert foreseen == pytest.approx(first)
    assert cached == found
