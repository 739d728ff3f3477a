"""Prefer pods with fewer requests in flight, counted over all proxies of the deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration, param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.endpoint_data import reads_load


@plugin("active-request-scorer")
@dataclass(frozen=True, slots=True)
class ActiveRequestScorer(Scorer):
    """1 up to `idleThreshold` requests, above it (max - requests) / max * maxBusyScore with the candidates' max."""

    idle_threshold: int = param(0, "number of requests up to which a pod counts as idle; below 0: 0")
    max_busy_score: float = param(1.0, "upper limit of the score of a busy pod; outside [0, 1]: 1")
    request_timeout: Duration | None = param(
        None, "accepted and without effect: the end of every request is counted exactly"
    )
    load: DataKey[int] = reads_load()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        active = [endpoint.load.requests for endpoint in endpoints]
        busiest, idle = max(active), max(0, self.idle_threshold)
        if busiest <= idle:
            return [1.0] * len(active)
        scale = self.max_busy_score if 0.0 <= self.max_busy_score <= 1.0 else 1.0
        return [1.0 if count <= idle else (busiest - count) / busiest * scale for count in active]
