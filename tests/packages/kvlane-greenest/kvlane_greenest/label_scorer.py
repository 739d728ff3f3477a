"""Prefer pods in regions with clean electricity: a scorer, all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("greenest-region-scorer")
@dataclass(frozen=True, slots=True)
class GreenestRegionScorer(Scorer):
    """The share of renewable energy in the pod's region; 0 for regions that are not listed."""

    region_label: str = param("region", "label with the pod's region")
    renewable_share: Mapping[str, float] = param({}, "region -> share in [0, 1]")

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self.renewable_share.get(endpoint.labels.get(self.region_label, ""), 0.0) for endpoint in endpoints]
