"""Prefer pods that have the LoRA adapter loaded, or room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("lora-affinity-scorer")
@dataclass(frozen=True, slots=True)
class LoraAffinityScorer(Scorer):
    """1 where the adapter is active, 0.8 where there is room for one more, 0.6 where it waits to be loaded, else 0."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._score(request.model, endpoint) for endpoint in endpoints]

    @staticmethod
    def _score(model: str, endpoint: Endpoint) -> float:
        metrics = endpoint.metrics
        if model in metrics.active_models:
            return 1.0
        if len(metrics.active_models) + len(metrics.waiting_models) < metrics.max_active_models:
            return 0.8
        return 0.6 if model in metrics.waiting_models else 0.0
