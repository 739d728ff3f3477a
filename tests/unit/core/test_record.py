"""Times of the calls of plugins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from proxy.core.decision import DecisionRecord, ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import DataProducer, Scorer, plugin
from proxy.core.request import InferenceRequest
from tests.helpers.telemetry.fakes import World

RUN = ProfileRun("default")
REQUEST = InferenceRequest("id", "/v1/completions", "sim")


@plugin("half")
class Half(Scorer, DataProducer):
    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [0.5] * len(endpoints)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        pass


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


def recording(world: World) -> DecisionRecord:
    return DecisionRecord(world.observer.plugin_timed, Ticking())


def test_every_recorded_call_is_timed_and_returns_what_the_plugin_returns() -> None:
    world, half = World(), Half()
    record, pods = recording(world), [Endpoint("a"), Endpoint("b")]
    for _ in range(2):
        assert record.call("Scorer", half, "mine", half.score, RUN, REQUEST, pods) == [0.5, 0.5]
    seen = world.scrape()
    assert seen["kvlane_plugin_duration_seconds_count"] == {("Scorer", "mine", "half"): 2}
    assert seen["kvlane_plugin_duration_seconds_sum"] == {("Scorer", "mine", "half"): 2.0}


async def test_a_producer_is_timed_until_it_has_produced() -> None:
    world, half = World(), Half()
    await recording(world).wait("DataProducer", half, "mine", half.produce(REQUEST, []))
    assert world.catalogue.plugin_seconds.cell("DataProducer", "half", "mine").sum == 1.0


def test_a_plugin_that_raises_is_timed_and_raises() -> None:
    world, broken = World(), Broken()
    with pytest.raises(RuntimeError, match="broken"):
        recording(world).call("Scorer", broken, "mine", broken.score, RUN, REQUEST, [])
    assert world.catalogue.plugin_seconds.cell("Scorer", "broken", "mine").sum == 1.0
