"""Prefer the pod where the request costs the fewest seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.cycle_state import DataKey
from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest
from proxy.latency.keys import LATENCY


@plugin("latency-scorer")
@dataclass(frozen=True, slots=True)
class LatencyScorer(Scorer):
    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (LATENCY,)

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        forecast = request.state.read(LATENCY)
        if forecast is None:
            return [0.0] * len(endpoints)
        costs = forecast.costs(endpoints)
        best = min(costs)
        return [1.0 / (1.0 + (cost - best)) for cost in costs]
