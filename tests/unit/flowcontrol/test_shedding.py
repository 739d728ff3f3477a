"""What may be dropped, and when it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from random import Random
from typing import Any, Self, cast

import pytest

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.errors import Reason, Shed
from proxy.core.request import InferenceRequest
from proxy.fleet.store import Pods
from proxy.flowcontrol.controller import FlowControl, LoadShedding, chance
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings, ShedByLoad, Shedding
from proxy.latency.forecast import LATENCY
from proxy.openai.parse import Parsed
from proxy.pool import Pool
from tests.unit.flowcontrol.test_controller import Watcher
from tests.unit.test_gateway import ScriptedRelay, World


class Chance(Random):
    def __new__(cls, *numbers: float) -> Self:
        return super().__new__(cls)

    def __init__(self, *numbers: float) -> None:
        self._numbers: Iterator[float] = iter(numbers) if len(numbers) > 1 else repeat(numbers[0])

    def random(self) -> float:
        return next(self._numbers)


class Forecast:
    def __init__(self, ttft: float, tpot: float) -> None:
        self._ttft = ttft
        self._tpot = tpot

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return self.ttfts(endpoints)

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._ttft * (place + 1) for place in range(len(endpoints))]

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._tpot] * len(endpoints)

    def delays(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [0.0] * len(endpoints)

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        return 0.0

    @property
    def output(self) -> float:
        return 1.0


def pods(*waiting: int, kv_usage: float = 0.5, in_flight: int = 1) -> list[Endpoint]:
    made = []
    for number, queue in enumerate(waiting):
        pod = Endpoint(f"pod-{number}", state=EndpointState.READY)
        pod.charge(in_flight, 0)
        pod.publish(Metrics(waiting=queue, kv_usage=kv_usage, freshness=Freshness.FRESH), in_flight)
        made.append(pod)
    return made


def request(priority: int = -1, forecast: Forecast | None = None, **headers: str) -> InferenceRequest:
    made = InferenceRequest("r", "/", "m", priority=priority, stream=True, headers=headers)
    if forecast is not None:
        made.state.write(LATENCY, forecast)
    return made


@dataclass
class Ready:
    """Ready pods that serve any model."""

    ready: Sequence[Endpoint]

    def endpoints_for(self, model: str) -> Sequence[Endpoint]:
        return self.ready


def refused(
    settings: Shedding,
    incoming: InferenceRequest,
    endpoints: Sequence[Endpoint],
    drawn: float = 0.5,
    bands: Sequence[BandSettings] = (),
    counted_as: str = "-1",
) -> bool:
    watcher = Watcher()
    ready = cast(Pods, Ready(endpoints))
    admission = LoadShedding(FlowControlSettings(shedding=settings, bands=tuple(bands)), ready, Chance(drawn), watcher)
    refusal = None
    try:
        admission.admit(incoming)
        assert admission.narrow(incoming, endpoints) == endpoints
    except Shed as error:
        refusal = error
    assert watcher.not_served == ([] if refusal is None else [(counted_as, refusal.reason.value)])
    assert refusal is None or (refusal.reason, refusal.code) == (Reason.SATURATED, "queue_full")
    return refusal is not None


class TestByLoad:
    SETTINGS = Shedding(by_load=ShedByLoad())

    def test_the_probability_grows_with_the_saturation_up_to_one(self) -> None:
        by_load = ShedByLoad(queue_depth=10)
        chances = [chance(by_load, pods(waiting, kv_usage=0.0)) for waiting in (0, 1, 2, 3, 5, 10, 100)]
        assert chances == sorted(chances)
        assert chances[:2] == pytest.approx([0.0, 300 * 0.1**5])
        assert chances[-1] == 1.0

    def test_the_larger_of_queue_and_cache_counts_and_pods_that_do_not_report_are_full(self) -> None:
        by_load = ShedByLoad(power=1.0, k=1.0)
        assert chance(by_load, pods(1, kv_usage=0.4)) == pytest.approx(0.5)
        (silent,) = pods(0, kv_usage=0.0)
        silent.publish(replace(silent.metrics, freshness=Freshness.STALE), 0)
        assert chance(by_load, [silent, *pods(0, kv_usage=0.0)]) == pytest.approx(0.5)

    @pytest.mark.parametrize("power", [2000.0, 1e9])
    def test_a_huge_power_refuses_all_from_full_pods_on_and_none_below(self, power: float) -> None:
        by_load = ShedByLoad(queue_depth=10, power=power, k=1.0)
        chances = [chance(by_load, pods(waiting, kv_usage=0.0)) for waiting in (0, 9, 10, 11, 1000)]
        assert chances == [0.0, pytest.approx(0.0), 1.0, 1.0, 1.0]

    def test_only_sheddable_requests_are_refused(self) -> None:
        busy = pods(5, 5)
        assert refused(self.SETTINGS, request(-1), busy)
        assert not refused(self.SETTINGS, request(0), busy)
        assert not refused(self.SETTINGS, request(-1), pods(0, 0, kv_usage=0.0), drawn=0.0)

    def test_a_refused_request_is_counted_under_the_name_of_its_band(self) -> None:
        bands = [BandSettings(0), BandSettings(-1, name="batch"), BandSettings(-3)]
        for priority, name in ((-1, "batch"), (-3, "-3"), (-2, "-2")):
            assert refused(self.SETTINGS, request(priority), pods(5, 5), bands=bands, counted_as=name)

    def test_without_a_ready_pod_nothing_is_refused(self) -> None:
        assert not refused(self.SETTINGS, request(-1), [])

    async def test_a_request_is_refused_before_it_is_queued(self) -> None:
        it, watcher = World(names="a"), Watcher()
        pod = it.fleet.ready[0]
        pod.publish(Metrics(waiting=5, freshness=Freshness.FRESH), 1)
        settings = FlowControlSettings(max_concurrent=1, shedding=self.SETTINGS)
        control = FlowControl(settings, it.fleet, it.clock, watcher)
        admissions = [LoadShedding(settings, it.fleet, Chance(0.5), watcher), control]
        gateway = replace(it.gateway, all_pools=[Pool(it.fleet, it.scheduling, admissions)])
        async with control.admit(request(0)), asyncio.timeout(5):
            with pytest.raises(Shed, match="too busy"):
                await gateway.pools.send(request(-1), Parsed("m", b""), ScriptedRelay([]))
        assert watcher.gone_on == ["0"]
        assert watcher.not_served == [("-1", "rejected-saturated")]


class TestMissedObjectives:
    SETTINGS = Shedding(missed_objectives=True)

    @pytest.mark.parametrize(
        ("headers", "ttft", "tpot", "is_refused"),
        [
            ({"x-slo-ttft-ms": "500"}, 0.6, 0.01, True),
            ({"x-slo-ttft-ms": "500"}, 0.4, 0.01, False),
            ({"x-llm-d-slo-tpot-ms": "20"}, 0.4, 0.03, True),
            ({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "20"}, 0.4, 0.03, True),
            ({}, 99.0, 99.0, False),
        ],
    )
    def test_unreachable_objectives_are_refused(
        self, headers: dict[str, str], ttft: float, tpot: float, is_refused: bool
    ) -> None:
        incoming = request(-1, Forecast(ttft, tpot), **headers)
        assert refused(self.SETTINGS, incoming, pods(3, 3)) is is_refused
        assert not refused(self.SETTINGS, request(0, Forecast(ttft, tpot), **headers), pods(3, 3))

    def test_a_busy_pod_that_does_not_report_its_kv_usage_is_not_idle(self) -> None:
        incoming = request(-1, Forecast(9.0, 9.0), **{"x-slo-ttft-ms": "500"})
        assert refused(self.SETTINGS, incoming, pods(3, 3, kv_usage=0.0))

    @pytest.mark.parametrize("idle", [{"in_flight": 0}, {"kv_usage": 0.01}])
    def test_an_idle_pod_accepts_anything(self, idle: dict[str, Any]) -> None:
        incoming = request(-1, Forecast(9.0, 9.0), **{"x-slo-ttft-ms": "500"})
        assert not refused(self.SETTINGS, incoming, [*pods(3), *pods(0, **idle)])

    def test_without_predictions_nothing_is_refused(self) -> None:
        assert not refused(self.SETTINGS, request(-1, None, **{"x-slo-ttft-ms": "500"}), pods(3))
