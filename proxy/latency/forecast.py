"""The predicted cost of a request on each pod, as plugins read it, and the latency objectives of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import reads
from proxy.core.request import DataKey, InferenceRequest

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
HEADERS = frozenset(TTFT_HEADERS + TPOT_HEADERS)


class LatencyForecast(Protocol):
    """Predictions for one request, computed when they are called; in seconds, in the order of the endpoints."""

    __slots__ = ()

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Return the time to first token plus the cost for the requests that are served at the same time."""

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Return the time to first token."""

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Return the current time per token after the first, without the effect of later prompts."""

    def delays(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Return the sum of the delays of other responses if the prompt is computed there."""

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        """Return the time for which this prompt, with `uncached` tokens there, occupies the pod."""

    @property
    def output(self) -> float:
        """Mean tokens of a response."""


LATENCY: DataKey[LatencyForecast] = DataKey("LatencyPredictionInfo")


def reads_forecast() -> Any:
    """Declare the field of a plugin with the key of the predictions that it reads."""
    doc = "producer whose predictions are read; empty: the first one"
    return reads(LATENCY, "latencyPredictionInfoProducerName", doc)


STAGE_COST: DataKey[Callable[[Endpoint], float]] = DataKey("StageCosts")
"""The seconds that one stage of a request, such as its prefill, costs on an endpoint. Written by a decider while the
profile of the stage runs."""


class Objectives(NamedTuple):
    """Seconds to the first token and per token after it; None: no objective."""

    ttft: float | None
    tpot: float | None

    def headrooms(self, forecast: LatencyForecast, endpoints: Sequence[Endpoint]) -> Iterator[tuple[float, float]]:
        """Yield the share of each objective (first token, following tokens) that remains on each endpoint: negative
        if it is missed, 0 without an objective."""
        ttft, tpot = self
        for first, each in zip(forecast.ttfts(endpoints), forecast.tpots(endpoints), strict=True):
            yield 1.0 - first / ttft if ttft else 0.0, 1.0 - each / tpot if tpot else 0.0


def objectives(request: InferenceRequest) -> Objectives | None:
    """Return the objectives of a request, or None. A header counts if it is a positive number of milliseconds; an
    objective per token applies to streams only."""
    headers = request.headers
    ttft, tpot = _seconds(headers, TTFT_HEADERS), _seconds(headers, TPOT_HEADERS) if request.stream else None
    return None if ttft is None and tpot is None else Objectives(ttft, tpot)


def _seconds(headers: Mapping[str, str], names: Sequence[str]) -> float | None:
    for name in names:
        text = headers.get(name)
        if text is not None:
            try:
                milliseconds = float(text)
            except ValueError:
                continue
            if 0.0 < milliseconds < float("inf"):
                return milliseconds / 1000
    return None
