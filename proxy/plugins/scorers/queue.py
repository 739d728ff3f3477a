"""Prefer pods with fewer waiting requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("queue-scorer")
@dataclass(frozen=True, slots=True)
class QueueScorer(Scorer):
    """(max - waiting) / (max - min) over the candidates; all equal scores 1 for all."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        waiting = [endpoint.view.waiting for endpoint in endpoints]
        low, high = min(waiting), max(waiting)
        if low == high:
            return [1.0] * len(waiting)
        return [(high - count) / (high - low) for count in waiting]
