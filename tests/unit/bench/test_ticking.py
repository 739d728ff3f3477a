"""The ticking engine divides its time among prompts, and its oracle predicts it exactly."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bench.placement.ticking import TickingEngine, TickTiming
from proxy.lab.sim import SimConfig
from proxy.lab.workload import CHUNK, Job, named
from tests.helpers.bench.support import play, sequence

TIMING = TickTiming()
STEP = TIMING.step


def played(
    jobs: tuple[Job, ...], config: SimConfig | None = None, timing: TickTiming = TIMING
) -> list[tuple[float, float, int]]:
    """Of each request: its first token, its last, and the tokens it found."""
    sequences, first, last = play(TickingEngine(config or SimConfig(), timing), jobs)
    return [(first[one.index], last[one.index], one.cached) for one in sequences]


def test_a_single_prompt_takes_a_tick_per_chunk_and_a_response_one_per_token() -> None:
    ((first, last, cached),) = played(named([Job(1.0, 1_024, 101, (1, 2))]))
    assert [first, last] == pytest.approx([1.0 + 4 * STEP, 1.0 + 104 * STEP])
    assert cached == 0


def test_prompts_alternate_so_that_a_short_one_overtakes_a_long_one() -> None:
    long, short = played(named([Job(0.0, 8 * 256, 1, (1, 2, 3, 4)), Job(0.0, 2 * 256, 1, (5,))]))
    assert short[0] == pytest.approx(4 * STEP)
    assert long[0] == pytest.approx(10 * STEP)


def test_with_places_for_all_chunks_no_prompt_waits() -> None:
    wide = replace(TIMING, chunks=8)
    first, other = played(named([Job(0.0, 2_048, 1, (1, 2, 3, 4)), Job(0.0, 512, 1, (5,))]), timing=wide)
    assert [first[0], other[0]] == pytest.approx([8 * STEP, 2 * STEP])


def test_a_later_prompt_joins_the_end_of_the_queue() -> None:
    jobs = named([Job(0.0, 512, 1, (1,)), Job(0.0, 512, 1, (2,)), Job(1.5 * STEP, 256, 1, (3,))])
    assert [first for first, _, _ in played(jobs)] == pytest.approx([3 * STEP, 5 * STEP, 4 * STEP])


def test_more_responses_than_places_in_the_batch_slow_down() -> None:
    narrow = replace(TIMING, batch=1, chunks=2)
    one, other = played(named([Job(0.0, 256, 11, (1,)), Job(0.0, 256, 11, (2,))]), timing=narrow)
    assert one[1] == other[1] == pytest.approx(STEP + 20 * STEP)


def test_a_repeated_prompt_costs_its_new_part() -> None:
    (_, (first, _, cached)) = played(named([Job(0.0, 1_024, 1, (1, 2)), Job(10.0, 1_536, 1, (1, 2, 3))]))
    assert first == pytest.approx(10.0 + 2 * STEP)
    assert cached == 1_024


def test_a_request_without_enough_free_blocks_waits() -> None:
    (one, other) = played(
        named([Job(0.0, 1_024, 11, (1, 2)), Job(0.0, 1_024, 1, (3, 4))]), SimConfig(num_gpu_blocks=100)
    )
    assert other[0] > one[1]


def test_a_slow_pod_takes_proportionally_longer() -> None:
    jobs = named([Job(0.0, 1_000, 101, (1, 2))])
    ((first, last, _),) = played(jobs)
    ((slow_first, slow_last, _),) = played(jobs, SimConfig(slowdown=3.0))
    assert [slow_first, slow_last] == pytest.approx([3 * first, 3 * last])


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_the_predicted_time_of_the_last_request_is_its_time(seed: int, chunks: int) -> None:
    rng = Random(seed)
    timing = replace(TIMING, chunks=chunks)
    now, jobs = 0.0, []
    for at in range(rng.choice([3, 20, 50])):
        now += rng.expovariate(rng.choice([5.0, 50.0]))
        ids = (rng.randint(0, 2), *(100 * at + more for more in range(1, 6)))
        jobs.append(Job(now, CHUNK + rng.randint(1, 5 * CHUNK), rng.randint(1, 200), ids))
    known = named(jobs)
    engine = TickingEngine(SimConfig(), timing)
    for index, job in enumerate(known[:-1]):
        while engine.until <= job.arrival:
            engine.finish()
        engine.submit(sequence(index, job), job.arrival)
    while engine.until <= known[-1].arrival:
        engine.finish()
    foreseen, cached = engine.foresee(sequence(len(known) - 1, known[-1]), known[-1].arrival)
    first, _, found = played(known, timing=timing)[-1]
    assert foreseen == pytest.approx(first)
    assert cached == found
