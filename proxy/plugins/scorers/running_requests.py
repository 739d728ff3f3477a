"""Prefer pods with fewer running requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("running-requests-size-scorer")
@dataclass(frozen=True, slots=True)
class RunningRequestsSizeScorer(Scorer):
    """(max - running) / (max - min) over the candidates; all equal scores 1 for all."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        running = [endpoint.view.running for endpoint in endpoints]
        low, high = min(running), max(running)
        if low == high:
            return [1.0] * len(running)
        return [(high - count) / (high - low) for count in running]
