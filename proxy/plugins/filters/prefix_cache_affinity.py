"""Keep the pods that hold the prompt, unless waiting for them takes longer than it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.ports import Random
from proxy.core.request import DataKey, InferenceRequest
from proxy.latency.forecast import LatencyForecast, reads_forecast
from proxy.plugins.endpoint_data import reads_load
from proxy.prefix.match import PrefixMatch, reads_prefix_match

PEAK = 15928.0
"""The default of llm-d, measured with a model of 32 billion parameters on two H100."""


@plugin("prefix-cache-affinity-filter")
@dataclass(frozen=True, slots=True)
class PrefixCacheAffinityFilter(Filter):
    """Keeps the pods that hold at least `affinityThreshold` of the prompt's blocks; all pods where none does.

    Also keeps all if the least loaded of the holders would respond more than `maxTTFTPenaltyMs` later than the least
    loaded of the others, where a pod's time to first token is its in-flight tokens over `peakPrefillThroughput`, or
    what predicted-latency-producer predicts.
    """

    random: Random
    affinity_threshold: float = param(
        0.8, "smallest cached share of the prompt's blocks; 0: the filter is off", at_least=0, at_most=1
    )
    exploration_probability: float = param(0.0, "probability of keeping all pods", at_least=0, at_most=1)
    max_ttft_penalty_ms: float = param(
        18000.0,
        "largest accepted delay of the first token, in milliseconds; 0: no limit",
        key="maxTTFTPenaltyMs",
        at_least=0,
    )
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = param(
        "prefillThroughput", "how the time to first token is estimated"
    )
    peak_prefill_throughput: float = param(
        PEAK, "prompt tokens that a pod computes per second; more than 0 where it is used", at_least=0
    )
    prefill_calibration_file: str = param("", "accepted and without effect: see peakPrefillThroughput")
    prefill_calibration_fingerprint: str = param("", "accepted and without effect, as prefillCalibrationFile")
    prefill_calibration_required: bool = param(False, "true needs peakPrefillThroughput, as files are not read")
    match: DataKey[PrefixMatch] = reads_prefix_match()
    load: DataKey[int] = reads_load()
    forecast: DataKey[LatencyForecast] = reads_forecast()

    def __post_init__(self) -> None:
        is_read = self.ttft_source == "prefillThroughput" and self.max_ttft_penalty_ms > 0
        if is_read and self.peak_prefill_throughput == 0:
            raise ValueError("peakPrefillThroughput: must be more than 0 with ttftSource prefillThroughput")
        if self.prefill_calibration_required and is_read and self.peak_prefill_throughput == PEAK:
            raise ValueError("prefillCalibrationRequired: files are not read; set peakPrefillThroughput instead")

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        load = (self.load,) if self.load.producer else ()
        forecast = (self.forecast,) if self.ttft_source == "latencyPredictor" else ()
        return (self.match, *load, *forecast)

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        match = request.state.read(self.match)
        if match is None or match.total == 0 or self.affinity_threshold == 0 or len(endpoints) <= 1:
            return endpoints
        if self.exploration_probability > 0 and self.random.random() < self.exploration_probability:
            return endpoints
        total, least = match.total, self.affinity_threshold
        held = list(zip(endpoints, match.matched(endpoints), strict=True))
        sticky = [endpoint for endpoint, blocks in held if blocks / total >= least]
        others = [endpoint for endpoint, blocks in held if blocks / total < least]
        if not sticky or self._costs_too_much(request, sticky, others):
            return endpoints
        return sticky

    def _costs_too_much(
        self, request: InferenceRequest, sticky: Sequence[Endpoint], others: Sequence[Endpoint]
    ) -> bool:
        if self.max_ttft_penalty_ms == 0 or not others:
            return False
        return self._soonest(request, sticky) - self._soonest(request, others) > self.max_ttft_penalty_ms

    def _soonest(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> float:
        """Return the shortest time to first token of these pods, in milliseconds."""
        forecast = request.state.read(self.forecast) if self.ttft_source == "latencyPredictor" else None
        if forecast is not None:
            return min(forecast.ttfts(endpoints)) * 1000
        return min(endpoint.load.tokens for endpoint in endpoints) / (self.peak_prefill_throughput or PEAK) * 1000
