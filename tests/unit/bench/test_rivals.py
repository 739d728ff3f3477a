"""What decides where the emulated routers send a request."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from bench.placement.pods import VirtualPod
from bench.placement.rivals.aibrix import PrefixCache
from bench.placement.rivals.dynamo import KvRouter
from bench.placement.rivals.hashing import BoundedPrefixHash, SessionHash
from bench.placement.rivals.llm_d import Affinity, Baseline, EndpointPicker
from bench.placement.rivals.production_stack import LoadAware, PrefixAware
from bench.placement.rivals.ray import PrefixTree
from bench.placement.rivals.sent import Sent
from bench.placement.rivals.sglang import CacheAware
from proxy.core.endpoint import Metrics
from proxy.lab.sim import SimConfig
from proxy.lab.workload import Job, named

PODS = range(4)


def router(kind: Any, seed: int = 1) -> Any:
    return kind([VirtualPod(index, SimConfig()) for index in PODS], Random(seed))


def jobs(*described: tuple[int, tuple[int, ...]]) -> tuple[Job, ...]:
    """(tokens of the prompt, its chunks)."""
    return named([Job(float(at), tokens, 10, ids) for at, (tokens, ids) in enumerate(described)])


def says(waiting: int = 0, kv_usage: float = 0.0) -> Metrics:
    return Metrics(waiting=waiting, kv_usage=kv_usage, block_size=16, blocks=8_192)


def llm_d_chooses(share_known: float, kv_usage: float) -> bool:
    """Whether the pod that knows so much of the prompt gets it, though the queue is its alone."""
    blocks = 40
    known = round(blocks * share_known)
    one, other = jobs((known * 64, tuple(range(-(-known // 8)))), (blocks * 64, tuple(range(5))))
    picker = router(EndpointPicker)
    knows = picker.choose(one, [0], 0.0)
    for pod in PODS:
        picker.scraped(pod, says(100, kv_usage) if pod == knows else says(), None, 0.0)
    return bool(picker.choose(other, PODS, 0.0) == knows)


@pytest.mark.parametrize(
    ("share_known", "kv_usage", "stays"),
    [(0.9, 0.0, True), (0.9, 0.34, True), (0.9, 0.36, False), (0.7, 0.04, True), (0.7, 0.06, False), (0.6, 0.0, False)],
)
def test_llm_d_keeps_a_pod_with_a_queue_until_its_memory_fills(
    share_known: float, kv_usage: float, stays: bool
) -> None:
    assert llm_d_chooses(share_known, kv_usage) is stays


def test_llm_d_draws_between_equals() -> None:
    unknown = jobs(*((1_000, (at, 100 + at)) for at in range(60)))
    assert len(Counter(router(EndpointPicker, seed).choose(unknown[0], PODS, 0.0) for seed in range(60))) == 4


def test_llm_d_sends_a_burst_between_scrapes_to_the_first_pod() -> None:
    picker = router(EndpointPicker)
    burst = jobs(*((2_100, (0, 1, 2, 3, 100 + at)) for at in range(30)))
    assert len({picker.choose(job, PODS, 0.0) for job in burst}) == 1


def test_the_baseline_of_llm_d_spreads_unknown_prompts() -> None:
    picker = router(Baseline)
    unknown = jobs(*((1_000, (at, 100 + at)) for at in range(8)))
    assert Counter(picker.choose(job, PODS, 0.0) for job in unknown) == dict.fromkeys(PODS, 2)


def test_llm_ds_affinity_yields_to_much_less_load() -> None:
    picker = router(Affinity)
    known, again, long = jobs((2_048, (0, 1, 2, 3)), (2_148, (0, 1, 2, 3, 9)), (300_000, tuple(range(1_000, 1_600))))
    home = picker.place(0, known, 0.0)
    picker.first_byte(0, 0.0)
    assert picker.place(1, again, 0.0) == home
    picker._tokens[home] += long.prompt_tokens
    assert picker.place(2, again, 0.0) != home


def test_a_session_keeps_its_pod_and_uses_the_first_one_while_that_is_unreachable() -> None:
    hashing = router(SessionHash)
    sessions = [Job(0.0, 100, 10, (at,), (at,), session=f"user {at % 20}") for at in range(200)]
    homes = {job.session: hashing.choose(job, PODS, 0.0) for job in sessions[:20]}
    assert all(hashing.choose(job, PODS, 0.0) == homes[job.session] for job in sessions)
    assert set(homes.values()) == set(PODS)
    away = next(job for job in sessions if homes[job.session] == 2)
    assert hashing.choose(away, [0, 1, 3], 0.0) == 0


def test_a_prefix_hash_spills_above_125_percent_of_the_mean() -> None:
    hashing = router(BoundedPrefixHash)
    same = [Job(0.0, 600, 10, (7, at), (0, at)) for at in range(1, 41)]
    for at, job in enumerate(same):
        hashing.place(at, job, 0.0)
    assert max(hashing.in_flight) <= 13
    assert max(hashing.in_flight) > min(hashing.in_flight)


def test_prefix_aware_ignores_load_and_load_aware_uses_it() -> None:
    shared = jobs(*((1_100, (0, 1, 100 + at)) for at in range(20)))
    for kind, most in ((PrefixAware, 20), (LoadAware, 10)):
        stack = router(kind)
        for at, job in enumerate(shared):
            stack.place(at, job, 0.0)
        assert max(stack.in_flight) == most if kind is PrefixAware else max(stack.in_flight) <= most


def test_aibrix_ignores_prefixes_while_loads_differ_by_more_than_sixteen_requests() -> None:
    aibrix = router(PrefixCache)
    known, again = jobs((1_100, (0, 1, 2)), (1_100, (0, 1, 3)))
    home = aibrix.choose(known, PODS, 0.0)
    assert aibrix.choose(again, PODS, 0.0) == home
    aibrix.in_flight[home] = 17
    assert aibrix.choose(again, PODS, 0.0) != home


def test_dynamo_sees_its_own_burst() -> None:
    dynamo = router(KvRouter)
    unknown = jobs(*((1_000, (at, 100 + at)) for at in range(8)))
    for at, job in enumerate(unknown):
        dynamo.place(at, job, 0.0)
    assert dynamo.in_flight == [2, 2, 2, 2]
    for at in range(8):
        dynamo.first_byte(at, 1.0)
        dynamo.ended(at, 2.0, 0)
    assert dynamo._prefilling == dynamo._decoding == [0, 0, 0, 0]


def test_ray_sends_prompts_that_share_a_tenth_to_one_pod_and_others_to_the_smallest_tree() -> None:
    ray = router(PrefixTree)
    shared = [(1_100, (0, 100 + at, 200 + at)) for at in range(10)]
    fresh = [(1_100, (1_000 + at, 2_000 + at, 3_000 + at)) for at in range(3)]
    chosen = [ray.choose(job, PODS, 0.0) for job in jobs(*shared, *fresh)]
    assert len(set(chosen[:10])) == 1
    assert set(chosen) == set(PODS)


def test_cache_aware_reports_pods_that_it_considers_equal() -> None:
    sglang = router(CacheAware)
    one, same = jobs((1_100, (0, 1, 2)), (1_100, (0, 1, 3)))
    assert sglang.acceptable(one, PODS) == [0, 1, 2, 3]
    sglang.remember(one, 2)
    assert sglang.acceptable(same, PODS) == [2]
    sglang.in_flight[2] = 65
    assert sglang.acceptable(same, PODS) == [0, 1, 3]


def test_sent_prompts_match_in_whole_blocks_and_equal_last_parts() -> None:
    sent = Sent(64)
    first, longer, same, cut = jobs((700, (0, 1)), (1_000, (0, 1)), (700, (0, 1)), (600, (0, 1)))
    assert sent.add(first) == 700
    assert sent.matched(longer) == 640
    assert sent.matched(same) == 700
    assert sent.matched(cut) == 576
    assert sent.add(longer) == 300
    assert sent.entries == 16


def test_the_oldest_prefixes_are_evicted_first() -> None:
    sent = Sent(64, most=20)
    first, second = jobs((1_024, (0, 1)), (1_024, (2, 3)))
    sent.add(first)
    sent.add(second)
    assert sent.matched(second) == 1_024
    assert sent.matched(first) == 0
    assert sent.entries <= 20
