"""What a role is sized and pressed by, read off its pods and off what the proxy itself knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.autoscale.observed import Sample
from proxy.autoscale.policy import KV_USAGE, QUEUE_DEPTH, TTFT
from proxy.autoscale.settings import PoolSettings, RoleSettings
from proxy.core.endpoint import Endpoint

BACKLOG = "prefill_backlog_seconds"
UNCACHED = "uncached_tokens"

_OF_PODS = {
    QUEUE_DEPTH: "waiting",
    "requests_running": "running",
    KV_USAGE: "kv_usage",
    "kv_cache_utilization_sum": "kv_usage",
}
"""What every pod reports."""

KNOWN = (*_OF_PODS, BACKLOG, UNCACHED, "requests_in_flight", TTFT)
"""The names of all that is measured without being asked for; any other is that of a value scraped from the pods."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the proxy knows of a role. `queued` are the requests that wait in it for a pod, `backlog` seconds of prefill
    that its predictions see before all pods together, `ttft` seconds; None: nobody can tell."""

    queued: int = 0
    backlog: float | None = None
    ttft: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One look at one role: its `ready` pods, at monotonic `now`. What a pod said longer than `age` seconds ago it has
    not said."""

    ready: Sequence[Endpoint]
    known: Known
    now: float
    age: float
    rate: float | None = None
    """Uncached prompt tokens per second of a replica, where that is configured."""

    def value(self, source: str) -> Any:
        """A number, or one per ready pod; None where it is not known."""
        if source == TTFT:
            return self.known.ttft
        if source == UNCACHED:
            return float(sum(pod.load.tokens for pod in self.ready))
        if source == BACKLOG:
            return self.known.backlog if self.rate is None else self.value(UNCACHED) / self.rate
        if source == QUEUE_DEPTH and not self.ready:
            return float(self.known.queued)
        found = [self._of_pod(pod, source) for pod in self.ready]
        return None if all(one is None for one in found) else found

    def mean(self, source: str) -> float | None:
        """Per ready pod, over those of which it is known."""
        value = self.value(source)
        if not isinstance(value, list):
            return _share(value, 1 if source == TTFT else len(self.ready) or 1)
        known = [one for one in value if one is not None and math.isfinite(one)]
        return math.fsum(known) / len(known) if known else None

    def _of_pod(self, pod: Endpoint, source: str) -> float | None:
        if source == "requests_in_flight":
            return float(pod.load.requests)
        if self.now - pod.metrics.scraped_at > self.age:
            return None
        if source == QUEUE_DEPTH:
            return pod.metrics.waiting + self.known.queued / len(self.ready)
        if (name := _OF_PODS.get(source)) is not None:
            return float(getattr(pod.metrics, name))
        return pod.metrics.attributes.get(source)


def _share(value: float | None, count: int) -> float | None:
    return None if value is None else value / count


def metrics_of(pool: PoolSettings, role: RoleSettings, measured: Measured) -> dict[str, Sample]:
    """Those that size the role, or all roles together."""
    metrics = pool.metrics if pool.total == "joint" else role.metrics
    return {one.name: Sample(measured.value(one.source or one.name), measured.now) for one in metrics}


def signals_of(pool: PoolSettings, role: RoleSettings, measured: Measured) -> dict[str, Sample]:
    """Those that may press the role, each per ready pod."""
    sources: Mapping[str, str] = {
        **{name: name for name in (QUEUE_DEPTH, KV_USAGE, TTFT)},
        **{name: one.source for name, one in pool.coordination.signals.get(role.name, {}).items()},
    }
    return {name: Sample(measured.mean(source), measured.now) for name, source in sources.items()}
