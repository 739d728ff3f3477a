"""Keep the pods below limits of utilization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.endpoint_data import reads_load


@dataclass(frozen=True, slots=True)
class Condition:
    metric: Literal["active-requests", "active-tokens", "running-requests", "waiting-queue", "kv-cache-utilization"] = (
        param(
            doc="metric to compare; active requests and uncached prompt tokens are counted by this proxy, KV cache "
            "usage is a share in [0, 1]"
        )
    )
    max_value: float = param(doc="largest value with which a pod is kept", at_least=0)

    def __post_init__(self) -> None:
        if self.metric == "kv-cache-utilization" and self.max_value > 1:
            raise ValueError(f"maxValue: must be at most 1 for kv-cache-utilization, not {self.max_value:g}")

    def met_by(self, endpoint: Endpoint) -> bool:
        if self.metric == "active-requests":
            return endpoint.load.requests <= self.max_value
        if self.metric == "active-tokens":
            return endpoint.load.tokens <= self.max_value
        view = endpoint.view
        if self.metric == "running-requests":
            return view.running <= self.max_value
        if self.metric == "waiting-queue":
            return view.waiting <= self.max_value
        return view.kv_usage <= self.max_value


@plugin("utilization-filter")
@dataclass(frozen=True, slots=True)
class UtilizationFilter(Filter):
    """Keeps pods that meet all conditions. If no pod does, the client receives 429."""

    exhausts: ClassVar[bool] = True

    conditions: tuple[Condition, ...] = param(doc="conditions metric <= maxValue; at least one")
    fallback_on_empty: bool = param(False, "keep all pods if none meets the conditions")
    keep_stale: bool = param(True, "keep pods whose metrics are stale; only their requests in flight are known")
    load: DataKey[int] = reads_load()

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ValueError("conditions: is empty, so the filter would keep every pod; add one, or remove the filter")

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        kept = [endpoint for endpoint in endpoints if all(condition.met_by(endpoint) for condition in self.conditions)]
        if not self.keep_stale:
            kept = [endpoint for endpoint in kept if endpoint.metrics.freshness is Freshness.FRESH]
        return endpoints if not kept and self.fallback_on_empty else kept
