"""Fifteen minutes of samples: totals of the metrics and of the engines' counters, and their changes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from proxy.autoscale.measures import Buckets, quantile_between
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.ports import Clock
from proxy.telemetry.metrics import PREFIX, Family, Histogram

log = logging.getLogger(__name__)

Labels = tuple[str, ...]


class Series:
    """Sums of the cells of one process or of several. `name` is the name of a family without `kvlane_`."""

    def __init__(self, families: Iterable[Family[Any]]) -> None:
        self._families = {family.name.removeprefix(PREFIX): family for family in families}

    def by(self, name: str, *labels: str) -> Mapping[Labels, float]:
        """Sum a counter or gauge by the values of these labels."""
        sums: dict[Labels, float] = {}
        for key, cell in self._cells(name, labels):
            sums[key] = sums.get(key, 0.0) + cell.value
        return sums

    def buckets(self, name: str) -> Buckets:
        """Sum all cells of a histogram."""
        cells: list[Histogram] = list(self._families[name].cells.values())
        if not cells:
            return ()
        counts = accumulate(map(sum, zip(*(cell.counts for cell in cells), strict=True)))
        return list(zip((*cells[0].bounds, inf), map(float, counts), strict=True))

    def masses(self, name: str, *labels: str) -> Mapping[Labels, tuple[float, float]]:
        """Return the number of observations of a histogram, and their sum, by the values of these labels."""
        masses: dict[Labels, tuple[float, float]] = {}
        for key, cell in self._cells(name, labels):
            count, total = masses.get(key, (0.0, 0.0))
            masses[key] = count + sum(cell.counts), total + cell.sum
        return masses

    def _cells(self, name: str, labels: Sequence[str]) -> Iterator[tuple[Labels, Any]]:
        family = self._families[name]
        positions = [family.labels.index(label) for label in labels]
        for values, cell in family.cells.items():
            yield tuple(values[position] for position in positions), cell


_WITHOUT_PROMPTS = ("decode", "encode")
_WITHOUT_COMPLETIONS = ("prefill", "encode", "encode-prefill")
"""Roles whose pods process tokens of a request that a pod of another role counts too."""


class EngineCounters(NamedTuple):
    """Totals of one pod since its engine started, or their increase; None if unknown or counted by another pod."""

    prompt: float | None
    generation: float | None
    queries: float | None
    hits: float | None
    is_silent: bool
    """Whether a pod has requests and does not report their tokens."""


def counters_of(endpoints: Iterable[Endpoint]) -> dict[str, EngineCounters]:
    """Return the counters by the name of the pod. Pods with stale metrics are left out."""
    found = {}
    for endpoint in endpoints:
        metrics, role = endpoint.metrics, endpoint.role
        if metrics.freshness is not Freshness.FRESH:
            continue
        has_prompts, has_completions = role not in _WITHOUT_PROMPTS, role not in _WITHOUT_COMPLETIONS
        prompt, generation = metrics.prompt_tokens, metrics.generation_tokens
        found[endpoint.name] = EngineCounters(
            prompt if has_prompts and prompt >= 0 else None,
            generation if has_completions and generation >= 0 else None,
            metrics.prefix_queries if has_prompts else None,
            metrics.prefix_hits if has_prompts else None,
            metrics.running > 0 and ((has_prompts and prompt < 0) or (has_completions and generation < 0)),
        )
    return found


def growth(before: Mapping[str, EngineCounters], now: Mapping[str, EngineCounters]) -> EngineCounters:
    """Return the increase of all pods. A pod that joined or restarted counts from its second sample on. Tokens are
    unknown while a pod does not report them: the sum of the others would be too low."""
    sums: list[float | None] = [None] * 4
    for was, counters in ((before[name], counters) for name, counters in now.items() if name in before):
        grown = [
            None if earlier is None or later is None else later - earlier
            for earlier, later in zip(was[:4], counters[:4], strict=True)
        ]
        if all(number is None or number >= 0 for number in grown):
            sums = [one if number is None else (one or 0.0) + number for one, number in zip(sums, grown, strict=True)]
    is_silent = any(counters.is_silent for counters in now.values())
    prompt, generation = (None, None) if is_silent else sums[:2]
    return EngineCounters(prompt, generation, sums[2], sums[3], is_silent)


INTERVAL = 5.0
LONGEST = 3 * INTERVAL
KEPT = 180
"""Number of stored points: a quarter of an hour."""

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
ENDINGS = {"complete": "good", "client-gone": "gone", "refused": "refused"}
"""Every other outcome of a request is a failure."""

NOT_SO_GOOD = {"4xx": "refused", "5xx": "failed"}
"""The kind of a complete response by its status; it may be an error."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals since the start, at a moment of monotonic time."""

    at: float
    histograms: Mapping[str, Buckets]
    counts: Mapping[str, float]
    refusals: Mapping[str, float]
    """Refused requests by reason."""
    engines: Mapping[str, EngineCounters]
    """Counters by the name of the pod."""

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
    """The periodic sampling of the series. `read` updates them; `endpoints` returns the fleet."""

    def __init__(
        self, read: Callable[[], Awaitable[Series]], clock: Clock, endpoints: Callable[[], Iterable[Endpoint]] = tuple
    ) -> None:
        self.samples = Samples()
        self.series: Series | None = None
        """The series of the last read."""
        self._read = read
        self._clock = clock
        self._endpoints = endpoints
        self._due_at = clock.now()

    async def update(self) -> None:
        now = self._clock.now()
        if now < self._due_at:
            return
        self._due_at = now + INTERVAL
        self.series = await self._read()
        self.samples.add(Totals.of(self.series, self._clock.now(), self._endpoints()), self._clock.wall())

    async def run(self) -> None:
        """Update until cancelled, so that viewers see the time before they connected."""
        while True:
            try:
                await self.update()
            except Exception:
                log.exception("dashboard: failed to read a point")
            await asyncio.sleep(INTERVAL)


class Samples:
    """The stored samples. `points` are in JSON, the oldest first; rates are per second."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._last: Totals | None = None

    def add(self, totals: Totals, wall: float) -> dict[str, Any] | None:
        """Add a sample and return the new point, which is also the last one. Return None for the first sample after a
        gap, and if the end of a worker has reduced the totals."""
        before, self._last = self._last, totals
        if before is None or not 0 < totals.at - before.at < LONGEST:
            return None
        grown = {key: number - before.counts.get(key, 0.0) for key, number in totals.counts.items()}
        if any(number < 0 for number in grown.values()):
            return None
        try:
            self.points.append({"t": round(wall, 1), **_between(before, totals, grown)})
        except ValueError:  # a histogram has fewer observations
            return None
        return self.points[-1]


def _between(before: Totals, now: Totals, grown: Mapping[str, float]) -> dict[str, Any]:
    """Return the changes. Raise ValueError if a histogram has fewer observations."""
    seconds = now.at - before.at
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
    """Return the tokens per second and the share of prompt tokens found in caches: from the counters of the pods, which
    count all requests, else from the responses that report usage. `tokensFrom` and `hitsFrom` name the source."""
    seconds, pods = now.at - before.at, growth(before.engines, now.engines)
    prompt, completion, source = grown["prompt"], grown["completion"], "responses"
    if pods.prompt is not None and pods.generation is not None:
        prompt, completion, source = pods.prompt, pods.generation, "pods"
    hits, hits_source = _ratio(grown["actualHits"], grown["actualPrompt"]), "responses"
    if pods.queries and pods.hits is not None:
        hits, hits_source = _ratio(min(pods.hits, pods.queries), pods.queries), "pods"
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
