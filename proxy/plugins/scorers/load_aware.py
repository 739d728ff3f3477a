"""Prefer pods whose queue is far below a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("load-aware-scorer")
@dataclass(frozen=True, slots=True)
class LoadAwareScorer(Scorer):
    """0.5 * (1 - min(waiting, threshold) / threshold): 0.5 with nothing waiting, 0 from the threshold on."""

    threshold: int = param(128, "waiting requests at which the score is 0; not above 0: 128")

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        threshold = self.threshold if self.threshold > 0 else 128
        return [0.5 * (1.0 - min(endpoint.view.waiting, threshold) / threshold) for endpoint in endpoints]
