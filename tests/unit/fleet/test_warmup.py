"""New pods are sent the most frequent prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import ManualClock
from proxy.fleet import warmup as warmup_module
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.warmup import SharedPrompts, Warmup
from proxy.openai.prompts import PromptHead
from tests.helpers.waiting import PATIENCE
from tests.unit.fleet.test_warmup_prompts import see


class Pod:
    """Responds with `status`, or not at all; prompts in `has` are cached already."""

    def __init__(self, status: int = 200, has: int = 0, error: bool = False) -> None:
        self.status = status
        self.has = has
        self.error = error
        self.sent: list[PromptHead] = []
        self.at_once = self.most_at_once = 0

    async def send(self, endpoint: Endpoint, prompt: PromptHead) -> int | None:
        if self.has:
            self.has -= 1
            return None
        self.sent.append(prompt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        if self.error:
            raise UpstreamFailed("it is gone")
        return self.status


@asynccontextmanager
async def warmup(pod: Pod, shared: int = 5) -> AsyncIterator[Warmup]:
    given = WarmupSettings(prompts=4)
    prompts = SharedPrompts(given, ManualClock(), shared_by=2, sample=1)
    for number in range(shared):
        see(prompts, f"prompt {number} ", 2)
    async with Warmup(given, prompts, pod.send, ManualClock(), Random(1)) as it:
        yield it


async def over(it: Warmup) -> None:
    async with asyncio.timeout(PATIENCE):
        while it._running:
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup_module, "STAGGER", 0.01)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup_module, "CONCURRENCY", 1)


def ready() -> Endpoint:
    return Endpoint("a", state=EndpointState.READY)


async def test_a_pod_gets_the_configured_number_of_prompts_within_the_concurrency() -> None:
    pod = Pod()
    async with warmup(pod) as it:
        it.start(ready())
        await over(it)
    assert len(pod.sent) == len(set(pod.sent)) == 4
    assert pod.most_at_once == 2


async def test_a_pod_is_warmed_up_once_at_a_time_and_again_when_it_returns() -> None:
    pod, endpoint = Pod(), ready()
    async with warmup(pod) as it:
        it.start(endpoint)
        it.start(endpoint)
        await over(it)
        assert len(pod.sent) == 4
        it.start(endpoint)
        await over(it)
    assert len(pod.sent) == 8


async def test_prompts_known_to_be_cached_are_left_out() -> None:
    pod = Pod(has=3)
    async with warmup(pod) as it:
        it.start(ready())
        await over(it)
    assert len(pod.sent) == 1


@pytest.mark.parametrize("pod", [Pod(status=500), Pod(status=401), Pod(error=True)])
async def test_a_pod_that_refuses_prompts_is_left_alone(pod: Pod, one_at_a_time: None) -> None:
    async with warmup(pod) as it:
        it.start(ready())
        await over(it)
    assert len(pod.sent) == 1


async def test_a_pod_that_is_not_ready_gets_no_prompt() -> None:
    pod, endpoint = Pod(), ready()
    async with warmup(pod) as it:
        it.start(endpoint)
        update(endpoint, state=EndpointState.DRAINING)
        await over(it)
    assert pod.sent == []


async def test_without_prompts_no_warm_up_starts() -> None:
    async with warmup(Pod(), shared=0) as it:
        it.start(ready())
        assert not it._running


async def test_the_end_of_the_process_ends_a_warm_up(one_at_a_time: None) -> None:
    pod = Pod()
    async with warmup(pod) as it:
        it.start(ready())
        async with asyncio.timeout(PATIENCE):
            while not pod.sent:
                await asyncio.sleep(0.001)
    assert len(pod.sent) < 4
