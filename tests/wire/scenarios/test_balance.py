"""How requests spread: by weight, by load, and by what is cached."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from proxy.lab.sim import SimConfig, StepTiming
from tests.helpers.scenarios.stack import BLIND, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.05, per_prefill_token=0.0))
"""A burst has arrived long before the first response."""

LONG_PREFILLS = SimConfig(timing=StepTiming(per_prefill_token=0.0002))
"""What chance there is in the times of a busy machine is little of what a prompt takes, so that pods are alike."""

THREE_TO_ONE = [{"weight": 3}, {"weight": 1}]


def profile(*plugins: str) -> dict[str, Any]:
    refs = [{"pluginRef": plugin} for plugin in plugins]
    return {
        "plugins": [{"type": plugin} for plugin in plugins],
        "schedulingProfiles": [{"name": "default", "plugins": refs}],
    }


async def served(s: Stack, prompts: list[str], *, at_once: bool = False) -> Counter[str]:
    """Requests per pod."""
    if at_once:
        responses = await asyncio.gather(*(s.chat(prompt, max_tokens=2) for prompt in prompts))
    else:
        responses = [await s.chat(prompt, max_tokens=1) for prompt in prompts]
    assert {response.status for response, _ in responses} == {200}
    return Counter(response.headers["x-kvlane-endpoint"] for response, _ in responses)


def different(count: int) -> list[str]:
    return [f"question {number}" for number in range(count)]


@pytest.mark.parametrize(
    ("picker", "count", "tolerance"),
    [
        (("round-robin-picker",), 40, 0),
        (("random-picker",), 400, 52),  # six standard deviations
        (("weighted-random-picker",), 400, 52),
        (("queue-scorer", "max-score-picker"), 80, 4),
    ],
    ids=["round robin", "random", "weighted random", "ties"],
)
async def test_a_pod_with_three_times_the_weight_gets_three_times_the_requests(
    picker: tuple[str, ...], count: int, tolerance: int
) -> None:
    settings = {"scheduling": profile(*picker)}
    async with stack(2, settings=settings, each=THREE_TO_ONE) as s:
        shares = await served(s, different(count))
        assert abs(shares["pod-0"] - count * 3 / 4) <= tolerance


async def test_sixty_four_equal_new_prompts_use_some_pods() -> None:
    async with stack(8, SLOW, BLIND) as s:
        shares = await served(s, ["the same long prompt " * 400] * 64, at_once=True)
        assert 1 < len(shares) < 8
        assert max(shares.values()) <= 32
        await s.idle()


async def test_sixty_four_different_prompts_at_once_are_spread_by_the_ledger_alone() -> None:
    async with stack(8, SLOW, BLIND) as s:
        shares = await served(s, [f"{number} is a prompt of its own " * 60 for number in range(64)], at_once=True)
        assert sorted(shares.values()) == [8] * 8
        await s.idle()


async def test_a_pod_kept_busy_by_others_is_avoided() -> None:
    one_at_a_time = SimConfig(timing=SLOW.timing, max_num_seqs=1)
    async with stack(2, one_at_a_time) as s, contextlib.AsyncExitStack() as others:
        body = {"prompt": "long", "max_tokens": 2000, "stream": True}
        for _ in range(13):
            task = others.enter_async_context(s.http.post(s.pods[0].url + "/v1/completions", json=body))
            others.push_async_callback(cancelled, asyncio.get_running_loop().create_task(task))
        await until(lambda: s.app.fleet.endpoints[0].metrics.waiting == 12)
        assert await served(s, different(4)) == {"pod-1": 4}


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_conversations_stay_on_their_pod_and_documents_are_distributed() -> None:
    documents = [f"document {number}: " + "words of its own " * 200 for number in range(8)]
    async with stack(4, LONG_PREFILLS, BLIND) as s:
        homes = {}
        for document in documents:
            response, _ = await s.chat(document)
            homes[document] = response.headers["x-kvlane-endpoint"]
        assert Counter(homes.values()) == {"pod-0": 2, "pod-1": 2, "pod-2": 2, "pod-3": 2}
        for document in documents * 2:
            response, body = await s.chat(document)
            assert response.headers["x-kvlane-endpoint"] == homes[document]
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
