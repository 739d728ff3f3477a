"""Media go where they have been encoded before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.attempt import Stage
from proxy.core.endpoint import Endpoint
from proxy.core.request import CycleState, InferenceRequest
from proxy.core.state import PluginState, State
from tests.helpers.plugins.situations import RUN, attempt, make, pod, request

KIND = "mm-embeddings-cache-producer"


class World:
    def __init__(self, **parameters: Any) -> None:
        self.producer = make(KIND, **parameters)
        self.scorer = make("mm-embeddings-cache-scorer")
        self.pods = [pod("a"), pod("b"), pod("c")]

    async def scores(self, *pictures: str) -> list[float]:
        scores: list[float] = self.scorer.score(RUN, await self._prepared(*pictures), self.pods)
        return scores

    async def send(self, endpoint: Endpoint, *pictures: str, stage: Stage = Stage.WHOLE) -> None:
        dispatched = attempt(await self._prepared(*pictures), endpoint)
        dispatched.stage = stage
        self.producer.pre_request(dispatched, endpoint)

    async def _prepared(self, *pictures: str) -> InferenceRequest:
        parts = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        body = json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]})
        incoming = replace(request(), body=body.encode(), state=CycleState())
        await self.producer.produce(incoming, self.pods)
        return incoming


async def test_the_score_is_the_share_of_media_that_a_pod_has_encoded() -> None:
    world = World()
    a, b, _ = world.pods
    await world.send(a, "cat", "dog")
    await world.send(b, "dog", "dog")
    assert await world.scores("cat", "dog", "dog") == [1.0, 0.5, 0.0]
    assert await world.scores("cat", "cow") == [0.5, 0.0, 0.0]


async def test_a_request_without_media_scores_nowhere() -> None:
    world = World()
    await world.send(world.pods[0], "cat")
    assert await world.scores() == [0.0, 0.0, 0.0]


async def test_a_removed_pod_has_no_media() -> None:
    world = World()
    await world.send(world.pods[0], "cat")
    world.producer.endpoint_removed(world.pods[0])
    assert await world.scores("cat") == [0.0, 0.0, 0.0]


async def test_a_decode_pod_of_a_split_request_sees_no_media() -> None:
    world = World()
    a, b, c = world.pods
    for endpoint, stage in ((a, Stage.ENCODE), (b, Stage.PREFILL), (c, Stage.DECODE)):
        await world.send(endpoint, "cat", stage=stage)
    assert await world.scores("cat") == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["cacheSizeInMBPerServer", "cacheSizeInMB"])
async def test_the_oldest_media_are_dropped_first(name: str) -> None:
    world = World(**{name: 4})
    a = world.pods[0]
    for picture in ("cat", "dog", "cat", "cow"):
        await world.send(a, picture)
    assert [(await world.scores(picture))[0] for picture in ("cat", "dog", "cow")] == [1.0, 0.0, 1.0]


async def test_the_default_size_is_used() -> None:
    world = World(cacheSizeInMBPerServer=0)
    for number in range(2049):
        await world.send(world.pods[0], str(number))
    assert [(await world.scores(picture))[0] for picture in ("0", "1")] == [0.0, 1.0]


async def test_a_changed_size_keeps_the_media() -> None:
    world, state = World(), State()
    draft = state.draft()
    world.producer = make(KIND, state=PluginState(draft))
    draft.commit()
    await world.send(world.pods[0], "cat")
    world.producer = make(KIND, state=PluginState(state.draft()), cacheSizeInMBPerServer=2)
    assert await world.scores("cat") == [1.0, 0.0, 0.0]
