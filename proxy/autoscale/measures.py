"""Measurements of a role: metrics and signals, from its pods and from the state of the proxy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from proxy.autoscale.policy import KV_USAGE, PREFILL_LOAD, QUEUE_DEPTH, SATURATION, TTFT, reading, readings
from proxy.autoscale.settings import PROMQL, RoleSettings, ScalingPolicy
from proxy.core.endpoint import Endpoint

BACKLOG = "prefill_backlog_seconds"
UNCACHED = "uncached_tokens"
KV_DEMAND = "kv_cache_demand_sum"

WINDOW = 30.0
"""Seconds over which recent values are measured."""

CLEARED = 60.0
"""Seconds in which waiting prompts should be computed, in addition to arriving prompts."""

_OF_PODS = {
    QUEUE_DEPTH: "waiting",
    "requests_running": "running",
    KV_USAGE: "kv_usage",
    "kv_cache_utilization_sum": "kv_usage",
}
"""Metrics that every pod reports."""


@dataclass(frozen=True, slots=True)
class KnownLoad:
    """Values of a role that the proxy measures: `queued` requests in its queues, the predicted prefill `backlog` of all
    pods in seconds, `ttft` in seconds, `taken` uncached prompt tokens per second; None if it is not known."""

    queued: int = 0
    backlog: float | None = None
    ttft: float | None = None
    taken: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The values of one role at monotonic `now`. Metrics that were scraped more than `age` seconds ago are missing.
    `ready` has the ready ranks of each replica with a ready rank. The unit of load is a data-parallel rank: the value
    of a replica is the mean of its ranks, and so is its part of a sum."""

    ready: Sequence[Sequence[Endpoint]]
    known: KnownLoad
    now: float
    age: float
    rate: float | None = None
    """Uncached prompt tokens per second that a replica can compute, if configured."""
    queried: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Values of queries with their times, by source. Queries return values per replica where that is needed."""

    def value(self, source: str) -> Any:
        """Return a number, or one per ready replica; None if it is not known."""
        if source.startswith(PROMQL):
            value, at = self.queried.get(source, (None, self.now))
            return value if self.now - at <= self.age else None
        if source == TTFT:
            return self.known.ttft
        if source == UNCACHED:
            return math.fsum(rank.load.tokens / len(ranks) for ranks in self.ready for rank in ranks)
        if source == BACKLOG:
            return self.known.backlog if self.rate is None else self.value(UNCACHED) / self.rate
        if source == PREFILL_LOAD:
            return self._prefill_load()
        if source == QUEUE_DEPTH and not self.ready:
            return float(self.known.queued)
        found = [_mean([self._of_rank(rank, source) for rank in ranks]) for ranks in self.ready]
        return None if all(one is None for one in found) else found

    def mean(self, source: str) -> float | None:
        """Return the mean over the ready replicas whose value is known."""
        value = self.value(source)
        if not isinstance(value, list):
            is_mean = source == TTFT or source.startswith(PROMQL)
            return value if value is None or is_mean else float(value / (len(self.ready) or 1))
        return _mean([one for one in value if one is not None and math.isfinite(one)])

    def _prefill_load(self) -> float | None:
        """Return the number of replicas that compute the tokens that arrive and wait."""
        if self.rate is None or self.known.taken is None:
            return None
        return float((self.known.taken + self.value(UNCACHED) / CLEARED) / self.rate)

    def _of_rank(self, pod: Endpoint, source: str) -> float | None:
        if source == "requests_in_flight":
            return float(pod.load.requests)
        if self.now - pod.metrics.scraped_at > self.age:
            return None
        waiting = pod.metrics.waiting + self.known.queued / sum(map(len, self.ready))
        if source == QUEUE_DEPTH:
            return waiting
        if source == KV_DEMAND:
            return pod.metrics.kv_usage * (1 + waiting / max(pod.metrics.running, 1))
        if (name := _OF_PODS.get(source)) is not None:
            return float(getattr(pod.metrics, name))
        return pod.metrics.attributes.get(source)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def metrics_of(pool: ScalingPolicy, role: RoleSettings, measured: Measured) -> dict[str, Any]:
    return {one.name: readings(measured.value(one.source or one.name)) for one in pool.metrics_of(role)}


def signals_of(pool: ScalingPolicy, role: RoleSettings, measured: Measured) -> dict[str, float]:
    """Return the pressure signals of the role that are known, each per ready replica."""
    own = {name: one.source for name, one in pool.coordination.signals.get(role.name, {}).items()}
    found = {
        name: reading(measured.mean(source)) for name, source in ({name: name for name in SATURATION} | own).items()
    }
    return {name: value for name, value in found.items() if value is not None}


PERCENTILE = 90.0


@dataclass(slots=True)
class Recent:
    _readings: deque[tuple[float, Buckets]] = field(default_factory=deque)

    def percentile(self, now: float, buckets: Buckets) -> float | None:
        """Return the percentile over the last WINDOW seconds, or since the first call; None without observations. A
        reset of the histogram starts the window again."""
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= now - WINDOW:
            readings.popleft()
        try:
            found = quantile_between(PERCENTILE, buckets, readings[0][1] if readings else buckets)
        except ValueError:
            readings.clear()
            found = None
        readings.append((now, list(buckets)))
        return found


Buckets = Sequence[tuple[float, float]]
"""Upper bound -> observations up to it, in the order of the bounds: a Prometheus histogram, the last bound infinite."""


def quantile_between(percentile: float, now: Buckets, past: Buckets = ()) -> float | None:
    """Return the quantile of the observations between two reads, linear within a bucket; a bucket without an upper
    bound ends at twice its lower one. None if there are no observations. An empty `past` is the beginning. Raise
    ValueError if `past` is not an earlier read of the same histogram."""
    if past and [bound for bound, _ in past] != [bound for bound, _ in now]:
        raise ValueError("the buckets have changed")
    before = [count for _, count in past] or [0.0] * len(now)
    counts = [count - old for (_, count), old in zip(now, before, strict=True)]
    if counts != sorted(counts) or (counts and counts[0] < 0):
        raise ValueError("the histogram was reset")
    if not counts or not counts[-1]:
        return None
    rank = math.ceil(counts[-1] * percentile / 100 - 1e-9)
    low, below = 0.0, 0.0
    for (bound, _), count in zip(now, counts, strict=True):
        high = low * 2 if math.isinf(bound) else bound
        if count > below and rank <= count:
            return high - (count - rank) * (high - low) / (count - below)
        low, below = high, count
    raise AssertionError("the last bucket has all")


@dataclass(slots=True)
class RoleSamples:
    """Uncached prompt tokens of a role."""

    _readings: deque[tuple[float, Mapping[Endpoint, float]]] = field(default_factory=deque)

    def rate(self, now: float, replicas: Sequence[Sequence[Endpoint]]) -> float | None:
        """Return the uncached tokens per second of all replicas, over the last WINDOW seconds or since the first call.
        A rank counts from its second call on; the part of a replica is the mean of its ranks. None if no pod counts
        tokens, and at the first call."""
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= now - WINDOW:
            readings.popleft()
        parts = {rank: 1 / len(ranks) for ranks in replicas for rank in ranks if rank.metrics.prefix_queries > 0}
        readings.append((now, {rank: rank.metrics.prefix_queries - rank.metrics.prefix_hits for rank in parts}))
        since = readings[0][0]
        if not parts or now <= since:
            return None
        return sum(self._grown(rank) * part for rank, part in parts.items()) / (now - since)

    def _grown(self, rank: Endpoint) -> float:
        """Return the growth; a counter that was reset has grown since then only."""
        counted = [reading[rank] for _, reading in self._readings if rank in reading]
        return sum(max(after - before, 0.0) for before, after in pairwise(counted))


def is_of(role: RoleSettings, pool: ScalingPolicy, endpoint: Endpoint) -> bool:
    if role.selector:
        return all(endpoint.labels.get(label) == value for label, value in role.selector.items())
    return len(pool.roles) == 1 or endpoint.role == role.name


def role_of(pool: ScalingPolicy, endpoint: Endpoint) -> str | None:
    """Return the first role whose selector matches."""
    return next((role.name for role in pool.roles if is_of(role, pool, endpoint)), None)


def replicas_of_role(pool: ScalingPolicy, name: str, endpoints: Iterable[Endpoint]) -> dict[str, list[Endpoint]]:
    """Return the ranks of each replica by name, for ranks that share a port and for ranks with a port each."""
    found: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        if role_of(pool, endpoint) == name:
            found.setdefault(endpoint.replica_name, []).append(endpoint)
    return found
