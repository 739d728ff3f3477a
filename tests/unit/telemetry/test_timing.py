from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from proxy.core.attempt import Attempt
from proxy.core.cycle_state import DataKey
from proxy.core.decision import Decision, ProfileResult, ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import (
    DataProducer,
    Filter,
    Picker,
    Plugin,
    PostResponse,
    PreRequest,
    ProfileHandler,
    Scorer,
    plugin,
)
from proxy.core.request import InferenceRequest
from proxy.telemetry.timing import Timing
from tests.helpers.telemetry.fakes import World

KEY: DataKey[int] = DataKey("Number")
RUN = ProfileRun("default")
REQUEST = InferenceRequest("id", "/v1/completions", "sim")


@plugin("everything")
@dataclass
class Everything(DataProducer, Filter, Scorer, Picker, PreRequest, PostResponse):
    """Every timed extension point in one; remembers its calls."""

    waits = False
    exhausts = True
    calls: list[str] = field(default_factory=list)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (KEY,)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        self.calls.append("produce")

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        self.calls.append("filter")
        return endpoints[:1]

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        self.calls.append("score")
        return [0.5] * len(endpoints)

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> Sequence[ScoredEndpoint]:
        self.calls.append("pick")
        return scored

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        self.calls.append("pre_request")

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        self.calls.append("post_response")


@plugin("broken")
class Broken(Scorer):
    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        raise RuntimeError("broken")


class Ticking:
    """A counter that moves by a second whenever it is asked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def timed(world: World, wrapped: Plugin, point: Any) -> Any:
    return Timing(world.catalogue, Ticking()).wrap(wrapped, cast(type, point), "default", "mine")


SYNCHRONOUS: list[tuple[Any, Callable[[Any], Any]]] = [
    (Filter, lambda p: p.filter(RUN, REQUEST, [Endpoint("a"), Endpoint("b")])),
    (Scorer, lambda p: p.score(RUN, REQUEST, [Endpoint("a")])),
    (Picker, lambda p: p.pick(RUN, REQUEST, [ScoredEndpoint(Endpoint("a"), 1.0)])),
    (PreRequest, lambda p: p.pre_request(None, Endpoint("a"))),
    (PostResponse, lambda p: p.post_response(None, Endpoint("a"))),
]


@pytest.mark.parametrize(("point", "call"), SYNCHRONOUS)
def test_every_call_gets_through_and_is_timed(point: Any, call: Callable[[Any], Any]) -> None:
    world, bare = World(), Everything()
    wrapper = timed(world, bare, point)
    for _ in range(2):
        call(wrapper)
    labels = (point.__name__, "mine", "everything")
    seen = world.scrape()
    assert len(bare.calls) == 2
    assert seen["kvlane_plugin_duration_seconds_count"] == {labels: 2}
    assert seen["kvlane_plugin_duration_seconds_sum"] == {labels: 2.0}


async def test_a_producer_is_timed_until_it_has_produced() -> None:
    world, bare = World(), Everything()
    wrapper = timed(world, bare, DataProducer)
    for _ in range(2):
        await wrapper.produce(REQUEST, [])
    assert len(bare.calls) == 2
    assert world.catalogue.plugin_seconds.cell("DataProducer", "everything", "mine").sum == 2.0


def test_what_a_plugin_answers_comes_back() -> None:
    world, pods = World(), [Endpoint("a"), Endpoint("b")]
    assert timed(world, Everything(), Filter).filter(RUN, REQUEST, pods) == pods[:1]
    assert timed(world, Everything(), Scorer).score(RUN, REQUEST, pods) == [0.5, 0.5]


def test_the_wrapper_promises_what_the_plugin_promises() -> None:
    wrapper = timed(World(), Everything(), DataProducer)
    assert wrapper.plugin_type == "everything"
    assert wrapper.provides == (KEY,)
    assert wrapper.requires == ()
    assert wrapper.waits is False
    assert timed(World(), Everything(), Filter).exhausts is True


def test_a_plugin_that_raises_is_timed_and_raises() -> None:
    world = World()
    with pytest.raises(RuntimeError, match="broken"):
        timed(world, Broken(), Scorer).score(RUN, REQUEST, [])
    assert world.catalogue.plugin_seconds.cell("Scorer", "broken", "mine").sum == 1.0


def test_a_profile_handler_is_left_as_it_is() -> None:
    class Handler(ProfileHandler):
        def plan(self, request: InferenceRequest) -> Any:
            result: ProfileResult = yield "default"
            return Decision.from_result(result)

    handler = Handler()
    assert timed(World(), handler, ProfileHandler) is handler
