"""Prefer the pod where the request costs the fewest seconds, including the delays of other requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, ClassVar, Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.latency.forecast import HEADERS, STAGE_COST, LatencyForecast, Objectives, objectives, reads_forecast

ALIKE, ALIKE_SHARE = 0.005, 0.05
"""Seconds, plus a share of the lowest cost, within which costs count as equal, so that random errors do not send all
requests to the same pod."""

UNUSED = "accepted and without effect: predictions are always used"

BROKEN = 0.5
"""Pods that are predicted to miss an objective score below this value, the others above."""


@plugin("latency-scorer")
@dataclass(slots=True)
class LatencyScorer(Scorer):
    """1 / (1 + excess / `scaleSeconds`), where excess is what the pod costs more than the cheapest one: seconds to the
    first token, and a share of the delay of running responses; see predicted-latency-producer.

    With objectives in x-llm-d-slo-ttft-ms or x-llm-d-slo-tpot-ms (or without `llm-d-`), pods that are expected to keep
    them come first, ordered by the strategy; the others are ordered by how much they miss them.
    """

    uses: ClassVar[tuple[DataKey[Any], ...]] = (STAGE_COST,)
    scale_seconds: float = param(1.0, "excess that halves the score", more_than=0)
    ttft_weight: float = param(
        0.8, "weight of the time to first token in headroom and violation of objectives", at_least=0
    )
    tpot_weight: float = param(0.2, "weight of the time per token in headroom and violation of objectives", at_least=0)
    headroom_selection_strategy: Literal["cheapest", "least", "most"] = param(
        "cheapest", "order of the pods that meet the objectives: by cost, least headroom first or most headroom first"
    )
    composite_kv_weight: float = param(1.0, UNUSED, key="compositeKVWeight", at_least=0)
    composite_queue_weight: float = param(1.0, UNUSED, at_least=0)
    composite_prefix_weight: float = param(1.0, UNUSED, at_least=0)
    forecast: DataKey[LatencyForecast] = reads_forecast()
    prefix_match_info_producer_name: str = param(
        "", "accepted and without effect: predictions include the prefix match"
    )

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        forecast = request.state.read(self.forecast)
        if forecast is None:
            return [0.0] * len(endpoints)
        cost = request.state.read(STAGE_COST)
        if cost is not None:
            return self._by_cost(list(map(cost, endpoints)))
        if not HEADERS.isdisjoint(request.headers) and (wanted := objectives(request)) is not None:
            return self._keeping(wanted, forecast, endpoints)
        return self._by_cost(forecast.costs(endpoints))

    def _by_cost(self, costs: Sequence[float]) -> list[float]:
        scale, least, scores = self.scale_seconds, min(costs), []
        equal = least + ALIKE + ALIKE_SHARE * least
        for cost in costs:
            scores.append(1.0 if cost <= equal else scale / (scale + cost - least))  # noqa: PERF401  # a frame less
        return scores

    def _keeping(self, wanted: Objectives, forecast: LatencyForecast, endpoints: Sequence[Endpoint]) -> list[float]:
        weights = (self.ttft_weight, self.tpot_weight)
        headrooms = [tuple(map(mul, weights, each)) for each in wanted.headrooms(forecast, endpoints)]
        if self.headroom_selection_strategy == "cheapest":
            kept = self._by_cost(forecast.costs(endpoints))
        else:
            sign = 1.0 if self.headroom_selection_strategy == "least" else -1.0
            kept = [1.0 / (1.0 + max(0.0, 1.0 + sign * sum(each))) for each in headrooms]
        return [
            BROKEN + (1.0 - BROKEN) * score if min(each) >= 0.0 else BROKEN / (1.0 - sum(min(0.0, one) for one in each))
            for score, each in zip(kept, headrooms, strict=True)
        ]
