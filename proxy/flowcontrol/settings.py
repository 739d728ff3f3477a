"""The `flowControl` section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from proxy.core.params import Duration, Size, param

Ordering = Literal["fcfs", "edf", "slo-deadline"]
Fairness = Literal["strict", "round-robin", "deficit-round-robin", "least-service"]


@dataclass(frozen=True, slots=True)
class Saturation:
    """When pods count as full. `utilization` reads what pods report, `concurrency` the requests in flight on them."""

    detector: Literal["none", "utilization", "concurrency"] = param("none", "what saturation is measured by")
    queue_depth: int = param(5, "utilization: waiting requests of a pod that is full", at_least=1)
    kv_usage: float = param(
        0.8, "utilization: used share of the KV cache of a pod that is full", more_than=0, at_most=1
    )
    requests: int | None = param(
        100, "concurrency: requests in flight on a pod that is full; null: any number", at_least=1
    )
    tokens: int | None = param(
        1_000_000, "concurrency: uncached prompt tokens in flight on a pod that is full; null: any number", at_least=1
    )


@dataclass(frozen=True, slots=True)
class LeastService:
    """Order of tenants with the fairness `least-service`: weight x how little service a tenant received recently +
    waitWeight x how long its first request waits, both scaled to 0..1 over the waiting tenants."""

    weight: float = param(
        0.8, "weight of little received service, in tokens: 1 per prompt token, 2 per completion token", at_least=0
    )
    wait_weight: float = param(0.2, "weight of the waiting time of the first request", at_least=0)
    half_life: Duration = param(
        Duration(60.0), "time after which received service counts half; 0: it always counts", at_least=0
    )
    forget_after: Duration = param(
        Duration(3600.0), "time without a response after which received service is forgotten; 0: never", at_least=0
    )


@dataclass(frozen=True, slots=True)
class BandSettings:
    """A band. A priority that is not listed gets a band like the next one below, or else like the lowest."""

    priority: int = param(0, "priority of the objective; the highest band goes first")
    name: str = param("", "name in metrics; default: the priority")
    max_queued: int | None = param(None, "requests of the band that may wait; null: maxQueued", at_least=0)
    max_queued_bytes: Size | None = param(None, "total size of their bodies; null: maxQueuedBytes", at_least=1)
    queue_timeout: Duration | None = param(
        None, "longest wait of a request; null: flowControl.queueTimeout", more_than=0
    )
    ordering: Ordering | None = param(None, "order within a tenant; null: flowControl.ordering")
    fairness: Fairness | None = param(None, "fairness between tenants; null: flowControl.fairness")
    ceiling: float = param(1.0, "saturation at which requests of the band wait", at_least=0)


@dataclass(frozen=True, slots=True)
class ShedByLoad:
    queue_depth: int = param(5, "waiting requests of a pod that is full", at_least=1)
    kv_usage: float = param(0.8, "used share of the KV cache of a pod that is full", more_than=0, at_most=1)
    power: float = param(5.0, "of the saturation, on which the chance to be refused depends", more_than=0)
    k: float = param(300.0, "factor of it", more_than=0)


@dataclass(frozen=True, slots=True)
class Shedding:
    """Which requests of negative priority are refused."""

    by_load: ShedByLoad | None = param(None, "refuse a random share of them at once: k * saturation ^ power")
    missed_objectives: bool = param(
        False, "refuse requests whose objectives no pod is predicted to keep; needs predicted-latency-producer"
    )


@dataclass(frozen=True, slots=True)
class FlowControlSettings:
    """Queues. Without a cap and a detector every request is admitted at once."""

    max_concurrent: int | None = param(None, "requests in flight on all pods together", at_least=1)
    max_concurrent_per_pod: int | None = param(None, "requests in flight on a pod", at_least=1)
    max_tokens: int | None = param(None, "uncached prompt tokens in flight on all pods together", at_least=1)
    max_tokens_per_pod: int | None = param(None, "uncached prompt tokens in flight on a pod", at_least=1)
    saturation: Saturation = field(default_factory=Saturation)
    max_queued: int = param(5000, "requests that may wait; further ones are refused with 429", at_least=0)
    max_queued_bytes: Size = param(Size(256 << 20), "total size of the bodies of waiting requests", at_least=1)
    ceilings: Literal["fixed", "reflective"] = param(
        "fixed",
        "saturation at which bands wait: as each says, or lower for lower bands the fuller pods are, and by turns",
    )
    queue_timeout: Duration = param(Duration(60.0), "longest wait of a request, then it gets a 429", more_than=0)
    ordering: Ordering = param("fcfs", "order within a tenant: by arrival, by deadline, or by objective")
    fairness: Fairness = param(
        "round-robin",
        "between tenants of a band: by turns, by turns of uncached tokens, least service first, or only the ordering",
    )
    least_service: LeastService = field(default_factory=LeastService)
    shares: Mapping[str, float] = param(
        {}, "tenant -> how much of its band it gets for 1 of another, when both have requests waiting; 1 unless given"
    )
    bands: tuple[BandSettings, ...] = param((), "by priority")
    evict_sheddable: bool = param(False, "end running requests of negative priority when others have no capacity")
    shedding: Shedding = field(default_factory=Shedding)

    @property
    def limits(self) -> bool:
        """Whether requests can ever wait."""
        caps = (self.max_concurrent, self.max_concurrent_per_pod, self.max_tokens, self.max_tokens_per_pod)
        return any(caps) or self.saturation.detector != "none"

    @property
    def sheds(self) -> bool:
        return self.shedding.by_load is not None or self.shedding.missed_objectives

    def band_name(self, priority: int) -> str:
        """Return the name in metrics of the band of a priority."""
        return next((band.name for band in self.bands if band.priority == priority and band.name), str(priority))

    def part(self, workers: int) -> FlowControlSettings:
        """Return the settings of one of several workers: each has a share of the queue. Caps stay common to all."""
        if workers == 1:
            return self
        bands = tuple(
            replace(
                band,
                max_queued=None if band.max_queued is None else _part(band.max_queued, workers),
                max_queued_bytes=None if band.max_queued_bytes is None else Size(_part(band.max_queued_bytes, workers)),
            )
            for band in self.bands
        )
        size = Size(_part(self.max_queued_bytes, workers))
        return replace(self, max_queued=_part(self.max_queued, workers), max_queued_bytes=size, bands=bands)

    def __post_init__(self) -> None:
        priorities = [band.priority for band in self.bands]
        if len(set(priorities)) < len(priorities):
            raise ValueError("bands: each priority may have one band")
        if any(share <= 0 for share in self.shares.values()):
            raise ValueError("shares: must be more than 0")


def _part(most: int, workers: int) -> int:
    """Round up, so that the share is at least one unless the total is 0."""
    return -(-most // workers)


def warnings(settings: FlowControlSettings, path: str, request_seconds: float) -> Iterator[str]:
    """A sentence for each, beginning with its path. `path` is that of the section, and a request ends after
    `request_seconds` whatever it does."""
    if not settings.limits and replace(settings, shedding=FlowControlSettings().shedding) != FlowControlSettings():
        yield f"{path}: requests never wait, as there is no cap, such as maxConcurrentPerPod, and no detector."
    bands = [(f"bands[{index}].", band) for index, band in enumerate(settings.bands)]
    timeouts = [("queueTimeout", settings.queue_timeout)]
    timeouts += [(f"{at}queueTimeout", band.queue_timeout) for at, band in bands if band.queue_timeout is not None]
    for name, seconds in timeouts:
        if seconds >= request_seconds:
            yield f"{path}.{name}: {seconds:g} s never pass, as reliability.timeouts.request is {request_seconds:g} s."
    for at, band in bands:
        if band.max_queued is not None and band.max_queued > settings.max_queued:
            yield f"{path}.{at}maxQueued: {band.max_queued} never wait, as maxQueued is {settings.max_queued}."
    yield from _of_the_detector(settings, path)


def _of_the_detector(settings: FlowControlSettings, path: str) -> Iterator[str]:
    """The first band to wait does so at its ceiling."""
    saturation, cap = settings.saturation, settings.max_concurrent_per_pod
    if saturation.detector != "concurrency" or saturation.requests is None or cap is None:
        return
    lowest = min((band.ceiling for band in settings.bands), default=1.0)
    if settings.ceilings == "fixed" and saturation.requests * min(1.0, lowest) > cap:
        yield (
            f"{path}.saturation.requests: {saturation.requests} are never in flight on a pod, as maxConcurrentPerPod is"
            f" {cap}."
        )
