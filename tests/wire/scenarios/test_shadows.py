"""Profiles that would have decided otherwise, beside the one that decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proxy.app import App
from proxy.core.decision import Decision, ProfileResult, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.lab.sim import SimConfig
from proxy.latency.forecast import LATENCY, LatencyForecast
from proxy.serving import Shadows
from tests.helpers.scenarios.stack import Stack, stack

PRODUCERS = [{"type": "approx-prefix-cache-producer"}, {"type": "predicted-latency-producer"}]

PREFIX = {"name": "default", "plugins": [{"pluginRef": "prefix-cache-scorer"}, {"pluginRef": "max-score-picker"}]}

SCHEDULING: dict[str, Any] = {
    "plugins": [
        *PRODUCERS,
        {"type": "prefix-cache-scorer"},
        {"type": "no-hit-lru-scorer"},
        {"type": "max-score-picker"},
        {"type": "random-picker"},
    ],
    "schedulingProfiles": [
        PREFIX,
        {"name": "same", "shadow": True, "plugins": PREFIX["plugins"]},
        {"name": "dice", "shadow": True, "plugins": [{"pluginRef": "random-picker"}]},
    ],
}


class Forecast(LatencyForecast):
    """A forecast that says what the test says."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return self.ttfts(endpoints)

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._seconds[endpoint.name] for endpoint in endpoints]

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [0.0] * len(endpoints)

    def delays(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return self.tpots(endpoints)

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        return 0.0

    @property
    def output(self) -> float:
        return 1.0


async def regret(s: Stack, profile: str, sooner: str, suffix: str = "sum") -> float | None:
    return await s.sample(f'kvlane_shadow_regret_seconds_{suffix}{{profile="{profile}",sooner="{sooner}"}}')


def shadowed(app: App, forecast: Forecast | None, shadow: str) -> None:
    """A decision for pod-0, beside which a shadow chose another pod."""
    request = InferenceRequest("r", "/v1/completions", "sim")
    if forecast is not None:
        request.state.write(LATENCY, forecast)
    pods = {endpoint.name: endpoint for endpoint in app.fleet.endpoints}
    other = ProfileResult("other", (ScoredEndpoint(pods[shadow], 1.0),))
    decision = Decision(pods["pod-0"], shadows=(other,))
    Shadows(app.observer).decided(request, tuple(pods.values()), decision, 0.0, None)


async def test_the_predicted_extra_time_of_the_live_choice_is_the_regret() -> None:
    async with stack(2) as s:
        shadowed(s.app, Forecast({"pod-0": 1.5, "pod-1": 0.25}), "pod-1")
        shadowed(s.app, Forecast({"pod-0": 0.5, "pod-1": 0.75}), "pod-1")
        shadowed(s.app, Forecast({"pod-0": 0.5, "pod-1": 0.75}), "pod-0")
        assert await regret(s, "other", "shadow") == pytest.approx(1.25)
        assert await regret(s, "other", "live") == pytest.approx(0.25)
        assert await regret(s, "other", "neither", "count") == 1


async def test_without_a_prediction_there_is_no_regret() -> None:
    async with stack(2) as s:
        shadowed(s.app, None, "pod-1")
        assert await regret(s, "other", "shadow", "count") is None
        assert await s.sample('kvlane_shadow_decisions_total{agrees="false",profile="other"}') == 1


async def test_shadows_of_live_requests_are_compared_by_predicted_latency() -> None:
    async with stack(2, SimConfig(time_scale=20), {"scheduling": SCHEDULING}) as s:
        for _ in range(20):
            await s.chat("The same long question. " * 100, max_tokens=2)
        agreed = await s.sample('kvlane_shadow_decisions_total{agrees="true",profile="same"}')
        assert agreed is not None
        assert agreed >= 19  # the first request finds no prefix anywhere, so chance decides
        assert await regret(s, "same", "neither", "count") == 20
        dice = [await regret(s, "dice", sooner, "count") or 0 for sooner in ("live", "shadow", "neither")]
        assert sum(dice) == 20
        assert dice[0] > 0
