"""Requests that come in one window are placed together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.ports import ManualClock, Unconnected
from proxy.core.request import CycleState, InferenceRequest, Prompt
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT
from tests.helpers.plugins.situations import RUN, fault, make, pod, request

KIND = "burst-prefix-cache-producer"


class Pause(Unconnected):
    """A timer whose sleepers sleep until `wake`."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._morning = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._morning.wait()

    async def wake(self) -> None:
        morning, self._morning = self._morning, asyncio.Event()
        morning.set()
        for _ in range(4):
            await asyncio.sleep(0)


class World:
    def __init__(self, **parameters: Any) -> None:
        self.clock, self.pause = ManualClock(now=10.0), Pause()
        self.pods = [pod("a"), pod("b")]
        self.producer = make(KIND, clock=self.clock, timer=self.pause, **parameters)
        self.scorer = make("prefix-cache-scorer", prefixMatchInfoProducerName=KIND)

    async def come(self, prompt: bytes = b"", model: str = "model") -> tuple[InferenceRequest, asyncio.Task[None]]:
        incoming = replace(request(model=model), prompt=Prompt((prompt,) if prompt else ()), state=CycleState())
        task = asyncio.ensure_future(self.producer.produce(incoming, self.pods))
        await asyncio.sleep(0)
        return incoming, task

    def scores(self, incoming: InferenceRequest) -> list[float]:
        scores: list[float] = self.scorer.score(RUN, incoming, self.pods)
        return scores


async def test_equal_prompts_of_a_window_prefer_one_pod() -> None:
    world = World()
    first, one = await world.come(b"x" * 1000)
    world.clock.advance(0.04)
    second, other = await world.come(b"x" * 1000)
    alone, third = await world.come(b"y" * 1000)
    assert world.pause.slept == pytest.approx([0.1, 0.06, 0.06])
    assert not one.done()
    await world.pause.wake()
    assert all(task.done() for task in (one, other, third))
    assert [world.scores(incoming) for incoming in (first, second, alone)] == [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]


async def test_the_first_one_still_computes_its_prompt() -> None:
    world = World()
    first, _ = await world.come(b"x" * 1024)
    second, _ = await world.come(b"x" * 1024)
    await world.pause.wake()
    matches = [incoming.state.read(PREFIX_MATCH) for incoming in (first, second)]
    assert [match and list(match.missing(world.pods, 256)) for match in matches] == [[256, 256], [0, 256]]
    assert [match and match.blocks_on(world.pods[0]) for match in matches] == [0, 4]


async def test_a_request_after_a_window_is_in_the_next_one() -> None:
    world = World()
    first, _ = await world.come(b"x" * 1000)
    world.clock.advance(0.2)
    second, _ = await world.come(b"x" * 1000)
    await world.pause.wake()
    assert [world.scores(incoming) for incoming in (first, second)] == [[0.0, 0.0], [0.0, 0.0]]


async def test_a_client_that_leaves_does_not_change_the_others_pods() -> None:
    world = World()
    _, leaver = await world.come(b"x" * 1000)
    second, _ = await world.come(b"x" * 1000)
    third, _ = await world.come(b"x" * 1000)
    leaver.cancel()
    await world.pause.wake()
    assert [world.scores(incoming) for incoming in (second, third)] == [[1.0, 0.0], [1.0, 0.0]]


async def test_requests_without_prompt_or_choice_or_place_do_not_wait() -> None:
    world = World(maxBatchSize=1)
    _, task = await world.come()
    assert task.done()
    await world.come(b"x")
    _, task = await world.come(b"x")
    assert task.done()
    world.pods = world.pods[:1]
    _, task = await world.come(b"x")
    assert task.done()
    await world.pause.wake()


async def test_models_distinguish_prompts_and_tokens_beyond_the_compared_part_do_not() -> None:
    world = World(maxPrefixTokensToMatch=128)
    incoming = [await world.come(b"x" * 512 + end, model) for end, model in ((b"1", "m"), (b"2", "m"), (b"1", "n"))]
    await world.pause.wake()
    assert [world.scores(one) for one, _ in incoming] == [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]


async def test_token_ids_are_compared_if_known() -> None:
    world = World()
    first, second = (replace(request(), prompt=Prompt((text,)), state=CycleState()) for text in (b"one", b"two"))
    for incoming in (first, second):
        incoming.state.write(TOKENIZED_PROMPT, Prompt((b"\1\0\0\0" * 100,)))
    tasks = [asyncio.ensure_future(world.producer.produce(incoming, world.pods)) for incoming in (first, second)]
    await asyncio.sleep(0)
    await world.pause.wake()
    await asyncio.gather(*tasks)
    assert world.scores(first) == world.scores(second) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"windowDurationMs": 0}, "windowDurationMs"),
        ({"windowDurationMs": 10_001}, "windowDurationMs"),
        ({"maxPerReplica": 0}, "maxPerReplica must be -1 or at least 1"),
        ({"maxBatchSize": -2}, "maxBatchSize must be -1 or at least 1"),
        ({"maxPrefixTokensToMatch": 32}, "maxPrefixTokensToMatch must be 0 or at least blockSizeTokens"),
        ({"balanceBy": "pods"}, "balanceBy"),
    ],
)
def test_invalid_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    assert message in fault(KIND, **parameters)


def test_it_declares_its_duration() -> None:
    assert make(KIND, windowDurationMs=2500).takes == 2.5
