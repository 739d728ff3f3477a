"""What a client asks of its answer's times, and whether a pod is expected to keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.latency.keys import LatencyForecast

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
HEADERS = frozenset(TTFT_HEADERS + TPOT_HEADERS)


class Objectives(NamedTuple):
    """Seconds to the first token and per token after it; None: no objective."""

    ttft: float | None
    tpot: float | None

    def headrooms(self, forecast: LatencyForecast, endpoints: Sequence[Endpoint]) -> Iterator[tuple[float, float]]:
        """(of the first token, of those that follow): the share of the objective that is left, negative where it is
        broken, 0 where there is none; in the order of the endpoints."""
        ttft, tpot = self
        for first, each in zip(forecast.ttfts(endpoints), forecast.tpots(endpoints), strict=True):
            yield 1.0 - first / ttft if ttft else 0.0, 1.0 - each / tpot if tpot else 0.0


def objectives(request: InferenceRequest) -> Objectives | None:
    """None without any; what is no positive number of milliseconds is none. Only who streams sees single tokens."""
    headers = request.headers
    if HEADERS.isdisjoint(headers):
        return None
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
