"""What a role is sized and pressed by, read off its pods and off what the proxy itself knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.autoscale.observed import Sample
from proxy.autoscale.policy import KV_USAGE, PREFILL_LOAD, QUEUE_DEPTH, TTFT
from proxy.autoscale.settings import PoolSettings, RoleSettings
from proxy.autoscale.sources import PROMQL
from proxy.core.endpoint import Endpoint

BACKLOG = "prefill_backlog_seconds"
UNCACHED = "uncached_tokens"
KV_DEMAND = "kv_cache_demand_sum"

CLEARED = 60.0
"""Seconds in which prompts that wait are to be computed, beside those that come."""

_OF_PODS = {
    QUEUE_DEPTH: "waiting",
    "requests_running": "running",
    KV_USAGE: "kv_usage",
    "kv_cache_utilization_sum": "kv_usage",
}
"""What every pod reports."""

KNOWN = (*_OF_PODS, BACKLOG, UNCACHED, PREFILL_LOAD, KV_DEMAND, "requests_in_flight", TTFT)
"""The names of all that is measured without being asked for; any other is that of a value scraped from the pods."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the proxy knows of a role. `queued` are the requests that wait in it for a pod, `backlog` seconds of prefill
    that its predictions see before all pods together, `ttft` seconds, `taken` the uncached prompt tokens per second
    that the pods took up; None: nobody can tell."""

    queued: int = 0
    backlog: float | None = None
    ttft: float | None = None
    taken: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One look at one role: its `ready` pods, at monotonic `now`. What a pod said longer than `age` seconds ago it has
    not said.

    Replicas are pods, and the unit of load is a data-parallel rank: the value of a pod is the mean of its ranks, and so
    are its parts of the sums."""

    ready: Sequence[Endpoint]
    known: Known
    now: float
    age: float
    rate: float | None = None
    """Uncached prompt tokens per second of a replica, where that is configured."""
    queried: Mapping[str, Sample] = field(default_factory=dict)
    """By source, those that are queries."""

    def sample(self, source: str) -> Sample:
        """What a query said is of its own moment."""
        if source.startswith(PROMQL):
            return self.queried.get(source, Sample(None, self.now))
        return Sample(self.value(source), self.now)

    def mean_sample(self, source: str) -> Sample:
        """As `sample`, and per ready pod; a query is that already."""
        return self.sample(source) if source.startswith(PROMQL) else Sample(self.mean(source), self.now)

    def value(self, source: str) -> Any:
        """A number, or one per ready pod; None where it is not known."""
        if source == TTFT:
            return self.known.ttft
        if source == UNCACHED:
            return math.fsum(rank.load.tokens / len(pod.ranks) for pod in self.ready for rank in pod.ranks)
        if source == BACKLOG:
            return self.known.backlog if self.rate is None else self.value(UNCACHED) / self.rate
        if source == PREFILL_LOAD:
            return self._prefill_load()
        if source == QUEUE_DEPTH and not self.ready:
            return float(self.known.queued)
        found = [_mean([self._of_rank(rank, source) for rank in pod.ranks]) for pod in self.ready]
        return None if all(one is None for one in found) else found

    def mean(self, source: str) -> float | None:
        """Per ready pod, over those of which it is known."""
        value = self.value(source)
        if not isinstance(value, list):
            return _share(value, 1 if source == TTFT else len(self.ready) or 1)
        known = [one for one in value if one is not None and math.isfinite(one)]
        return math.fsum(known) / len(known) if known else None

    def _prefill_load(self) -> float | None:
        """Replicas' worth of the tokens that come, and of those that wait."""
        if self.rate is None or self.known.taken is None:
            return None
        return float((self.known.taken + self.value(UNCACHED) / CLEARED) / self.rate)

    def _of_rank(self, pod: Endpoint, source: str) -> float | None:
        if source == "requests_in_flight":
            return float(pod.load.requests)
        if self.now - pod.metrics.scraped_at > self.age:
            return None
        waiting = pod.metrics.waiting + self.known.queued / sum(len(one.ranks) for one in self.ready)
        if source == QUEUE_DEPTH:
            return waiting
        if source == KV_DEMAND:
            return pod.metrics.kv_usage * (1 + waiting / max(pod.metrics.running, 1))
        if (name := _OF_PODS.get(source)) is not None:
            return float(getattr(pod.metrics, name))
        return pod.metrics.attributes.get(source)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _share(value: float | None, count: int) -> float | None:
    return None if value is None else value / count


def metrics_of(pool: PoolSettings, role: RoleSettings, measured: Measured) -> dict[str, Sample]:
    """Those that size the role, or all roles together."""
    metrics = pool.metrics if pool.total == "joint" else role.metrics
    return {one.name: measured.sample(one.source or one.name) for one in metrics}


def signals_of(pool: PoolSettings, role: RoleSettings, measured: Measured) -> dict[str, Sample]:
    """Those that may press the role, each per ready pod."""
    sources: Mapping[str, str] = {
        **{name: name for name in (QUEUE_DEPTH, KV_USAGE, TTFT)},
        **{name: one.source for name, one in pool.coordination.signals.get(role.name, {}).items()},
    }
    return {name: measured.mean_sample(source) for name, source in sources.items()}
