"""Caps that hold for all workers of a host."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.lab.sim import SimConfig, SimPod
from tests.helpers.cluster.host import host

REQUESTS = 30


def most_at_once(pods: list[SimPod]) -> int:
    """By the pods' own word."""
    events = [
        (time, step) for pod in pods for each in pod.requests if each.method == "POST" for time, step in _of(each)
    ]
    most = now = 0
    for _, step in sorted(events):
        now += step
        most = max(most, now)
    return most


def _of(record: Any) -> tuple[tuple[float, int], tuple[float, int]]:
    return (record.arrived, 1), (record.ended, -1)


@pytest.mark.parametrize(
    ("cap", "all_pods", "per_pod"),
    [
        ({"maxConcurrent": 1}, 1, 1),
        ({"maxConcurrent": 5}, 5, 5),
        ({"maxConcurrentPerPod": 1}, 2, 1),
        ({"maxConcurrentPerPod": 3}, 6, 3),
        ({"maxConcurrent": 4, "maxConcurrentPerPod": 3}, 4, 3),
    ],
    ids=str,
)
async def test_all_workers_together_keep_a_cap_and_serve_all_requests(
    cap: dict[str, int], all_pods: int, per_pod: int
) -> None:
    async with host(2, 2, SimConfig(time_scale=1), flowControl=cap) as h:
        served = await asyncio.gather(*(h.chat(f"Question {number}", 10) for number in range(REQUESTS)))
        assert set(served) <= {"pod-0", "pod-1"}
        waits = await h.samples("kvlane_queue_wait_seconds_count")
        assert sum(waits.values()) == REQUESTS
        pods = list(h.sim.pods)
    assert most_at_once(pods) <= all_pods
    assert max(most_at_once([pod]) for pod in pods) <= per_pod
    assert most_at_once(pods) >= all_pods - 1, "and use it"


@pytest.mark.parametrize("cap", [{"maxTokens": 4000}, {"maxTokensPerPod": 2100}], ids=str)
async def test_all_workers_together_keep_a_cap_on_tokens(cap: dict[str, int]) -> None:
    """Four prompts of 1,000 tokens, and a little, are more than that."""
    most = 0
    async with host(2, 2, SimConfig(time_scale=0.5), flowControl=cap) as h:
        tasks = [asyncio.ensure_future(h.chat(f"{number}" + "x" * 4000, 2)) for number in range(12)]
        while not all(one.done() for one in tasks):
            most = max(most, sum(endpoint.load.tokens for endpoint in h.supervisor.fleet.endpoints))
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)
    assert 1000 <= most <= 4200
