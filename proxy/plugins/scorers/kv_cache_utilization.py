"""Prefer pods with free KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("kv-cache-utilization-scorer")
@dataclass(frozen=True, slots=True)
class KvCacheUtilizationScorer(Scorer):
    """1 - KV cache usage."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [1.0 - endpoint.view.kv_usage for endpoint in endpoints]
