from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from bench.placement import policies
from bench.placement.generators import generate
from bench.placement.pods import VirtualPod
from bench.placement.report import Objectives, figures, summary
from proxy.core.ports import ManualClock
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import Restart, Simulation, SimulationOutcome
from proxy.lab.workload import Job, Workload, named

POLICIES = ("default", *policies.NAMED)


def run(
    name: str,
    workload: Workload,
    configs: list[SimConfig] | None = None,
    restarts: tuple[Restart, ...] = (),
    seed: int = 1,
    *,
    says_cached: bool = True,
) -> list[SimulationOutcome]:
    pods = [VirtualPod(index, config) for index, config in enumerate(configs or [SimConfig(num_gpu_blocks=8_000)] * 4)]
    clock = ManualClock()
    policy = policies.make(name, pods, clock, Random(seed), says_cached=says_cached)
    return Simulation(workload.jobs, pods, policy, clock, Random(seed), restarts).run()


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_completes_once_and_in_order(name: str) -> None:
    for outcome in run(name, generate("conversations", 300, 30.0, Random(1))):
        assert outcome.first_token is not None
        assert outcome.ended is not None
        assert outcome.job.arrival < outcome.first_token <= outcome.ended


def test_prompts_of_any_length_are_placed() -> None:
    (outcome,) = run("default", Workload("book", named([Job(0.0, 100_000, 5, tuple(range(196)))])))
    assert outcome.ended is not None


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_repeats_the_run(name: str) -> None:
    workload = generate("documents", 200, 30.0, Random(2))
    assert run(name, workload) == run(name, workload)


def test_kvlane_returns_to_the_pod_with_the_conversation() -> None:
    turns = named([Job(float(at) * 10, 1_000 + 500 * at, 20, tuple(range(2 + at))) for at in range(5)])
    outcomes = run("default", Workload("one", turns))
    assert len({outcome.pod for outcome in outcomes}) == 1
    for outcome in outcomes[1:]:
        assert outcome.cached_tokens > 0.6 * outcome.job.prompt_tokens
        assert outcome.predicted_tokens == pytest.approx(outcome.cached_tokens, abs=64)


def test_kvlane_sees_its_own_burst_before_any_scrape() -> None:
    jobs = named([Job(0.001 * at, 2_000, 50, (at, 100 + at, 200 + at, 300 + at)) for at in range(16)])
    assert set(Counter(outcome.pod for outcome in run("default", Workload("burst", jobs))).values()) == {4}


def test_round_robin_alternates() -> None:
    outcomes = run("round-robin", generate("bimodal", 40, 5.0, Random(1)))
    assert set(Counter(outcome.pod for outcome in outcomes).values()) == {10}


def test_the_oracle_avoids_the_slow_pod_unless_it_is_sooner() -> None:
    slow = [SimConfig(slowdown=10.0), SimConfig(), SimConfig(), SimConfig()]
    outcomes = run("oracle", generate("bimodal", 300, 3.0, Random(1)), slow)
    served = Counter(outcome.pod for outcome in outcomes)
    assert served[0] < min(served[1], served[2], served[3]) / 2


def test_cache_aware_sends_prompts_that_share_a_third_to_one_pod() -> None:
    jobs = named([Job(0.001 * at, 1_024, 50, (0, at + 1)) for at in range(40)])
    assert max(Counter(outcome.pod for outcome in run("cache-aware", Workload("herd", jobs))).values()) == 40


def test_a_request_whose_pod_dies_before_its_first_byte_is_retried() -> None:
    jobs = named([Job(0.0, 60_000, 10, tuple(range(at * 200, at * 200 + 118))) for at in range(4)])
    outcomes = run("default", Workload("long", jobs), restarts=(Restart(0, 1.0),))
    (retried,) = [outcome for outcome in outcomes if outcome.retries]
    assert retried.pod != 0
    assert retried.ended is not None


def test_a_request_whose_pod_dies_during_its_response_is_lost() -> None:
    jobs = named([Job(0.0, 100, 1_000, (at,)) for at in range(4)])
    outcomes = run("default", Workload("answers", jobs), restarts=(Restart(0, 1.0),))
    assert [outcome.ended is None for outcome in outcomes].count(True) == 1
    assert all(outcome.first_token is not None for outcome in outcomes)


def test_kvlane_avoids_a_dead_pod_and_expects_no_hits_after_it_returns() -> None:
    system = tuple(range(8))
    jobs = named([Job(0.5 * at, 4_500, 10, (*system, 100 + at)) for at in range(200)])
    (favourite,) = {outcome.pod for outcome in run("default", Workload("steady", jobs))}
    outcomes = run("default", Workload("steady", jobs), restarts=(Restart(favourite, 20.0, down=10.0),))
    moved, away = outcomes[40], outcomes[41:59]
    assert moved.retries == 1
    assert moved.predicted_tokens == moved.cached_tokens == 0
    assert favourite not in {outcome.pod for outcome in away}
    assert all(outcome.predicted_tokens == outcome.cached_tokens == 4_096 for outcome in away)


def test_pods_that_do_not_report_cached_tokens_can_be_simulated() -> None:
    outcomes = run("default", generate("agents", 100, 5.0, Random(1)), says_cached=False)
    assert all(outcome.ended is not None for outcome in outcomes)


def test_a_good_request_meets_both_objectives() -> None:
    job = Job(10.0, 100, 11, (1,), (0,))
    fast, late, slow, lost = (
        SimulationOutcome(job, 0, 11.0, 11.4),
        SimulationOutcome(job, 0, 12.5, 12.6),
        SimulationOutcome(job, 0, 11.0, 12.0),
        SimulationOutcome(job, 0, 11.0, None),
    )
    pods = [VirtualPod(0, SimConfig())]
    policy = policies.make("random", pods, ManualClock(), Random(1), says_cached=True)
    gauges = Simulation([], pods, policy, ManualClock(), Random(1)).gauges
    found = figures([fast, late, slow, lost], gauges, Objectives(2.0, 0.05), 0.0)
    assert found["goodput"] == 0.25
    assert found["failed"] == 1
    assert found["ttft_mean"] == pytest.approx((1.0 + 2.5 + 1.0) / 3)
    assert found["tpot_p90"] == pytest.approx(0.1)


def test_the_interval_of_three_seeds_is_students_t() -> None:
    mean, half = summary([{"x": 1.0}, {"x": 2.0}, {"x": 3.0}])["x"]
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5)
