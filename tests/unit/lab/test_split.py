"""Requests whose prompt one virtual pod computes and another pod continues."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from proxy.core.attempt import Stage
from proxy.core.ports import ManualClock
from proxy.lab.engine import CountedRequest, CountingEngine
from proxy.lab.kvlane import Kvlane
from proxy.lab.sim import SimConfig, StepTiming
from proxy.lab.sim.config import TransferTiming
from proxy.lab.simulation import Restart, Simulation, VirtualPod
from proxy.lab.workload import Job, Workload, named
from proxy.settings import Settings, from_mapping
from tests.helpers.lab.traffic import TIMING, conversations

CONFIG = SimConfig(
    timing=StepTiming(base=0.01, per_prefill_token=0.0001, per_sequence=0.0),
    transfer=TransferTiming(base=0.005, per_token=0.00001),
    num_gpu_blocks=1_000,
)
TWO_AND_TWO = ("prefill", "prefill", "decode", "decode")


def split(roles: tuple[str, ...] = TWO_AND_TWO, decider: str = "always-disagg-pd-decider") -> Settings:
    """All pods of one role are chosen among by what is predicted."""
    profiles = [
        {"name": stage, "plugins": [{"pluginRef": f"{stage}-filter"}, {"pluginRef": "latency-scorer"}]}
        for stage in ("decode", "prefill")
    ]
    plugins = [
        {"type": "approx-prefix-cache-producer"},
        {"type": "predicted-latency-producer"},
        {"type": "decode-filter"},
        {"type": "prefill-filter"},
        {"type": "latency-scorer"},
        {"type": decider},
        {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider}}},
    ]
    pods = [{"url": f"http://pod:{port}", "role": role} for port, role in enumerate(roles, 1)]
    return from_mapping({"pods": {"static": pods}, "scheduling": {"plugins": plugins, "schedulingProfiles": profiles}})


def run(workload: Workload, settings: Settings, pods: int = 4, *restarts: Restart) -> tuple[Simulation, Kvlane]:
    config = SimConfig(timing=TIMING, num_gpu_blocks=8_000)
    fleet, clock = [VirtualPod(index, config) for index in range(pods)], ManualClock()
    policy = Kvlane(settings, fleet, clock, Random(1), says_cached=True)
    simulation = Simulation(workload.jobs, fleet, policy, clock, Random(2), restarts)
    simulation.run()
    return simulation, policy


def play(engine: CountingEngine) -> dict[int, list[float]]:
    """To its end: when each sequence had its first token, and its last."""
    times: dict[int, list[float]] = {}
    while engine.until < math.inf:
        now = engine.until
        for event in engine.finish():
            if not event.came:
                times.setdefault(event.sequence.index, []).append(now)
    return times


def test_a_transferred_prompt_takes_the_transfer_and_a_step_of_one_token() -> None:
    engine = CountingEngine(CONFIG)
    engine.submit(CountedRequest(0, 8_000, 2, ((1, 500),), comes=True), 1.0)
    assert engine.kv_usage(1.0) == 0.5
    assert play(engine)[0][0] == pytest.approx(1.0 + 0.005 + 0.08 + 0.01 + 0.0001)


def test_only_uncached_blocks_are_transferred() -> None:
    engine = CountingEngine(CONFIG)
    engine.submit(CountedRequest(0, 4_000, 1, ((1, 250),)), 0.0)
    play(engine)
    engine.submit(CountedRequest(1, 4_800, 1, ((1, 250), (2, 50)), comes=True), 5.0)
    assert play(engine)[1][0] == pytest.approx(5.0 + 0.005 + 0.008 + 0.01 + 0.0001)


def test_concurrent_transfers_share_the_link() -> None:
    engine = CountingEngine(CONFIG)
    for index in range(2):
        engine.submit(CountedRequest(index, 1_600, 1, ((index, 100),), comes=True), 0.0)
    first, second = (times[0] for times in play(engine).values())
    assert second - first == pytest.approx(0.016, abs=0.0102)
    assert second > 0.005 + 2 * 0.016


def test_a_prompt_computed_during_a_response_delays_it_and_a_fetched_one_does_not() -> None:
    """What splitting is for."""

    def slowest(*, comes: bool) -> float:
        engine = CountingEngine(CONFIG)
        engine.submit(CountedRequest(0, 16, 100, ((1, 1),)), 0.0)
        engine.finish()
        engine.submit(CountedRequest(1, 8_000, 1, ((2, 500),), comes=comes), 0.1)
        return play(engine)[0][-1]

    alone = 0.01 * 100
    assert slowest(comes=True) == pytest.approx(alone, abs=0.02)
    assert slowest(comes=False) == pytest.approx(alone + 0.8, abs=0.02)


def test_a_request_waiting_for_kept_blocks_continues_when_they_are_freed() -> None:
    engine = CountingEngine(CONFIG)
    kept = CountedRequest(0, 15_200, 1, ((1, 950),), stays=True)
    engine.submit(kept, 0.0)
    play(engine)
    assert engine.kv_usage(2.0) == 0.95
    engine.submit(CountedRequest(1, 1_600, 1, ((2, 100),)), 2.0)
    assert engine.until == math.inf
    engine.let_go(kept, 7.0)
    assert play(engine)[1][0] > 7.0
    assert engine.pool.used == 0


def test_kept_blocks_are_found_by_the_next_prompt_with_the_prefix() -> None:
    engine = CountingEngine(CONFIG)
    kept = CountedRequest(0, 1_600, 1, ((1, 100),), stays=True)
    engine.submit(kept, 0.0)
    play(engine)
    engine.let_go(kept, 1.0)
    following = CountedRequest(1, 3_200, 1, ((1, 100), (2, 100)))
    engine.submit(following, 2.0)
    play(engine)
    assert following.cached == 1_600


def test_a_transferred_prompt_that_lost_its_blocks_is_computed_again() -> None:
    engine = CountingEngine(replace(CONFIG, num_gpu_blocks=110))
    engine.submit(CountedRequest(0, 800, 400, ((1, 50),)), 0.0)
    engine.finish()
    engine.submit(CountedRequest(1, 880, 300, ((2, 55),), comes=True), 0.1)
    assert len(play(engine)) == 2
    assert engine.preemptions
    assert engine.pool.used == 0


@pytest.mark.parametrize("seed", range(20))
def test_all_requests_get_responses_and_no_block_is_left_in_use(seed: int) -> None:
    rng = Random(seed)
    engine = CountingEngine(replace(CONFIG, num_gpu_blocks=rng.choice([150, 400]), max_num_seqs=rng.choice([2, 64])))
    kept, now, ended = [], 0.0, set()
    for index in range(60):
        now += rng.expovariate(5.0)
        prompt = rng.randint(1, 1_000)
        stage = rng.choice([Stage.WHOLE, Stage.PREFILL, Stage.DECODE])
        named_parts = ((rng.choice([7, index + 100]), prompt // 16),) if prompt >= 16 else ()
        reply = 1 if stage is Stage.PREFILL else rng.randint(1, 60)
        one = CountedRequest(
            index, prompt, reply, named_parts, stays=stage is Stage.PREFILL, comes=stage is Stage.DECODE
        )
        while engine.until <= now:
            at = engine.until
            for event in engine.finish():
                if event.last:
                    ended.add(event.sequence.index)
                if event.last and event.sequence.stays:
                    kept.append((at, event.sequence))
            for _, other in kept:
                engine.let_go(other, at)
            kept.clear()
        engine.submit(one, now)
    while engine.busy:
        at = engine.until
        for event in engine.finish():
            if event.last:
                ended.add(event.sequence.index)
            if event.last and event.sequence.stays:
                engine.let_go(event.sequence, at)
    assert len(ended) == 60
    assert engine.pool.used == 0


def test_every_stage_runs_on_a_pod_of_its_role_and_frees_its_blocks() -> None:
    simulation, policy = run(conversations(200, 6.0), split())
    for outcome in simulation.outcomes:
        assert outcome.prefill_pod in {0, 1}
        assert outcome.pod in {2, 3}
        assert outcome.first_token is not None
        assert outcome.ended is not None
    assert policy.ledger.in_flight == 0
    assert all(pod.engine.kv_usage(simulation.now) == 0 for pod in simulation.pods)


def test_the_next_turn_finds_the_blocks_of_the_prefill_pod() -> None:
    simulation, _ = run(conversations(200, 6.0), split())
    assert sum(outcome.cached_tokens > 0 for outcome in simulation.outcomes) > 80


def test_without_a_prefill_pod_one_pod_does_all() -> None:
    simulation, _ = run(conversations(60, 3.0), split(("decode",) * 3), 3)
    assert all(outcome.prefill_pod == -1 and outcome.ended is not None for outcome in simulation.outcomes)


@pytest.mark.parametrize("pod", range(4))
def test_a_pod_of_either_role_that_restarts_loses_no_request(pod: int) -> None:
    workload = conversations(120, 8.0)
    simulation, policy = run(workload, split(), 4, Restart(pod, at=5.0), Restart(pod, at=11.0, down=1.0))
    unanswered = [outcome for outcome in simulation.outcomes if outcome.first_token is None]
    assert not unanswered
    assert sum(outcome.retries for outcome in simulation.outcomes) > 0
    assert policy.ledger.in_flight == 0


def test_a_long_prompt_delays_no_response_if_it_is_split() -> None:
    chats = [Job(0.01 * index, 200, 400, (index,)) for index in range(8)]
    long = [Job(1.0 + 0.5 * index, 16_000, 2, tuple(range(100 + 40 * index, 132 + 40 * index))) for index in range(6)]
    workload = Workload("mixed", named([*chats, *long]))
    together, apart = (
        run(workload, split(("prefill", "decode"), decider), 2)[0].outcomes[:8]
        for decider in ("prefix-based-pd-decider", "always-disagg-pd-decider")
    )
    slow, fast = (sum(one.ended - one.job.arrival for one in outcomes if one.ended) for outcomes in (together, apart))
    assert fast < 0.7 * slow
