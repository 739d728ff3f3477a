"""The last quarter of an hour: totals of the series, looked at every five seconds, and what happened in between."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.autoscale.measures import quantile_between
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.dashboard.engine_counters import EngineCounters, counters_of, growth
from proxy.dashboard.series import Buckets, Series

log = logging.getLogger(__name__)

INTERVAL = 5.0
LONGEST = 3 * INTERVAL
KEPT = 180
"""Points; a quarter of an hour."""

PERCENTILES = (50, 90, 99)

HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "time_per_output_token_seconds",
    "e2e": "request_duration_seconds",
    "decide": "scheduling_duration_seconds",
    "wait": "queue_wait_seconds",
}
COUNTERS = {
    "retries": "retries",
    "prompt": "prompt_tokens",
    "completion": "completion_tokens",
    "predictedPrompt": "prefix_predicted_prompt_tokens",
    "predictedHits": "prefix_predicted_hit_tokens",
    "actualPrompt": "prefix_actual_prompt_tokens",
    "actualHits": "prefix_actual_hit_tokens",
}
NAMES = (
    *("requests", "refused", "shadow_decisions", "shadow_regret_seconds", "attempts"),
    *HISTOGRAMS.values(),
    *COUNTERS.values(),
)
"""The families that anything here is made of."""

PODS, RESPONSES = "pods", "responses"
"""Sources of a figure."""

ENDINGS = {"complete": "good", "client-gone": "gone", "refused": "refused"}
"""Every other outcome of a request is a failure."""

NOT_SO_GOOD = {"4xx": "refused", "5xx": "failed"}
"""By the status of a whole answer, which may be an error."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start, at a moment of monotonic time."""

    at: float
    histograms: Mapping[str, Buckets]
    counts: Mapping[str, float]
    refusals: Mapping[str, float]
    """By reason."""
    engines: Mapping[str, EngineCounters]
    """By the name of the pod."""

    @classmethod
    def of(cls, series: Series, at: float, endpoints: Iterable[Endpoint] = ()) -> Totals:
        histograms = {key: series.buckets(name) for key, name in HISTOGRAMS.items()}
        counts = {key: sum(series.by(name).values()) for key, name in COUNTERS.items()}
        for (outcome, status), number in series.by("requests", "outcome", "status").items():
            kind = ENDINGS.get(outcome, "failed")
            kind = NOT_SO_GOOD.get(status, kind) if kind == "good" else kind
            counts[kind] = counts.get(kind, 0.0) + number
        refusals = {reason: number for (reason,), number in series.by("refused", "reason").items()}
        return cls(at, histograms, counts, refusals, counters_of(endpoints))


class Sampling:
    """Looks at the series when that is due. `read` brings them up to date; `endpoints` returns the fleet."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Series]],
        clock: Clock,
        endpoints: Callable[[], Iterable[Endpoint]] = tuple,
    ) -> None:
        self.samples = Samples()
        self.series: Series | None = None
        """As they were read last."""
        self._read = read
        self._clock = clock
        self._endpoints = endpoints
        self._due_at = clock.now()

    async def look(self) -> None:
        now = self._clock.now()
        if now < self._due_at:
            return
        self._due_at = now + INTERVAL
        self.series = await self._read()
        self.samples.take(Totals.of(self.series, self._clock.now(), self._endpoints()), self._clock.wall())

    async def run(self) -> None:
        """Until cancelled: for those who want to see what was before they came."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("dashboard: a point is missing")
            await asyncio.sleep(INTERVAL)


class Samples:
    """`points` are the oldest first, in JSON; rates are per second."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._last: Totals | None = None

    def take(self, totals: Totals, wall: float) -> dict[str, Any] | None:
        """The new point, which is the last one too. None for the first look in a while, and where a worker that is gone
        has taken its share of the totals along."""
        before, self._last = self._last, totals
        if before is None or not 0 < totals.at - before.at < LONGEST:
            return None
        try:
            point = _between(before, totals)
        except ValueError:
            return None
        self.points.append({"t": round(wall, 1), **point})
        return self.points[-1]


def _between(before: Totals, now: Totals) -> dict[str, Any]:
    """Raises ValueError if something has counted down."""
    seconds = now.at - before.at
    grown = {key: number - before.counts.get(key, 0.0) for key, number in now.counts.items()}
    if any(number < 0 for number in grown.values()):
        raise ValueError("a counter has begun anew")
    refused = {reason: number - before.refusals.get(reason, 0.0) for reason, number in now.refusals.items()}
    return {
        "seconds": round(seconds, 2),
        **{key: round(grown.get(key, 0.0) / seconds, 3) for key in _RATES},
        "predicted": _ratio(grown["predictedHits"], grown["predictedPrompt"]),
        "actual": _ratio(grown["actualHits"], grown["actualPrompt"]),
        **_tokens(before, now, grown),
        "refusals": {reason: round(number) for reason, number in refused.items() if number},
        **{key: _percentiles(now.histograms[key], before.histograms[key]) for key in HISTOGRAMS},
    }


def _tokens(before: Totals, now: Totals, grown: Mapping[str, float]) -> dict[str, Any]:
    """Tokens per second and the share of prompt tokens found in caches: by the counters of the pods, which count all
    requests, else by the responses that report usage. `tokensFrom` and `hitsFrom` name the source."""
    seconds, pods = now.at - before.at, growth(before.engines, now.engines)
    prompt, completion, source = grown["prompt"], grown["completion"], RESPONSES
    if pods.prompt is not None and pods.generation is not None:
        prompt, completion, source = pods.prompt, pods.generation, PODS
    hits, hits_source = _ratio(grown["actualHits"], grown["actualPrompt"]), RESPONSES
    if pods.queries and pods.hits is not None:
        hits, hits_source = _ratio(min(pods.hits, pods.queries), pods.queries), PODS
    return {
        "in": round(prompt / seconds, 3),
        "out": round(completion / seconds, 3),
        "tokensFrom": source,
        "hits": hits,
        "hitsFrom": hits_source,
    }


def _percentiles(now: Buckets, before: Buckets) -> list[float] | None:
    found = [quantile_between(percentile, now, before) for percentile in PERCENTILES]
    return [round(one, 6) for one in found if one is not None] or None


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


_RATES = ("good", "failed", "refused", "gone", "retries", "prompt", "completion")
