"""Keep the pods that are predicted to meet the request's objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.ports import Random
from proxy.core.request import DataKey, InferenceRequest
from proxy.latency.forecast import LatencyForecast, objectives, reads_forecast


@plugin("slo-headroom-tier-filter")
@dataclass(slots=True)
class SloHeadroomTierFilter(Filter):
    """Keeps the pods that are predicted to meet the objectives in x-llm-d-slo-ttft-ms or x-llm-d-slo-tpot-ms (or
    without `llm-d-`). With probability `epsilonExploreNeg` it keeps the other pods instead, so that predictions for
    them stay current. Keeps all pods if all or none meet the objectives, and for requests without objectives."""

    random: Random
    epsilon_explore_neg: float = param(
        0.01, "probability of keeping the pods that are predicted to miss an objective", at_least=0, at_most=1
    )
    forecast: DataKey[LatencyForecast] = reads_forecast()

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        wanted, forecast = objectives(request), request.state.read(self.forecast)
        if wanted is None or forecast is None:
            return endpoints
        keeps = [min(headroom) >= 0.0 for headroom in wanted.headrooms(forecast, endpoints)]
        if all(keeps) or not any(keeps):
            return endpoints
        if self.random.random() < self.epsilon_explore_neg:
            keeps = list(map(not_, keeps))
        return list(compress(endpoints, keeps))
