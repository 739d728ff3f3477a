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
    """When pods count as full. `utilization` looks at what they report, `concurrency` at what is in flight on them."""

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
    """Whose turn it is where fairness is `least-service`: weight x how little a tenant has had of late + waitWeight x
    how long its first request waits, both from 0 to 1 among those that wait."""

    weight: float = param(
        0.8, "of how little it has had, in tokens: 1 for each of a prompt, 2 for each of an answer", at_least=0
    )
    wait_weight: float = param(0.2, "of how long its first request waits", at_least=0)
    half_life: Duration = param(
        Duration(60.0), "after which what it has had counts half; 0: it always counts", at_least=0
    )
    forget_after: Duration = param(
        Duration(3600.0), "without an answer, after which it has had nothing; 0: never", at_least=0
    )


@dataclass(frozen=True, slots=True)
class BandSettings:
    """A priority that is not listed has a band of its own that is as the next one below, or else as the lowest."""

    priority: int = param(0, "of the objective; the highest band goes first")
    name: str = param("", "what metrics call it; the priority unless given")
    max_queued: int | None = param(None, "requests of the band that may wait; null: as many as wait in all", at_least=0)
    max_queued_bytes: Size | None = param(None, "their bodies together; null: as much as waits in all", at_least=1)
    queue_timeout: Duration | None = param(
        None, "that a request waits; null: as flowControl.queueTimeout says", more_than=0
    )
    ordering: Ordering | None = param(None, "within a tenant; null: as flowControl.ordering says")
    fairness: Fairness | None = param(None, "among tenants; null: as flowControl.fairness says")
    ceiling: float = param(1.0, "saturation at which requests of the band wait", at_least=0)


@dataclass(frozen=True, slots=True)
class ShedByLoad:
    queue_depth: int = param(5, "waiting requests of a pod that is full", at_least=1)
    kv_usage: float = param(0.8, "used share of the KV cache of a pod that is full", more_than=0, at_most=1)
    power: float = param(5.0, "of the saturation, on which the chance to be refused depends", more_than=0)
    k: float = param(300.0, "factor of it", more_than=0)


@dataclass(frozen=True, slots=True)
class Shedding:
    """Which requests of negative priority are refused at once."""

    by_load: ShedByLoad | None = param(None, "some, by chance: k * saturation ^ power of them")
    missed_objectives: bool = param(
        False, "those whose objectives no pod is predicted to keep, where predicted-latency-producer is at work"
    )


@dataclass(frozen=True, slots=True)
class FlowControlSettings:
    """Without a cap and a detector every request goes on at once."""

    max_concurrent: int | None = param(None, "requests in flight on all pods together", at_least=1)
    max_concurrent_per_pod: int | None = param(None, "requests in flight on a pod", at_least=1)
    max_tokens: int | None = param(None, "uncached prompt tokens in flight on all pods together", at_least=1)
    max_tokens_per_pod: int | None = param(None, "uncached prompt tokens in flight on a pod", at_least=1)
    saturation: Saturation = field(default_factory=Saturation)
    max_queued: int = param(5000, "requests that may wait; what comes beyond is refused with 429", at_least=0)
    max_queued_bytes: Size = param(Size(256 << 20), "their bodies together", at_least=1)
    ceilings: Literal["fixed", "reflective"] = param(
        "fixed",
        "saturation at which bands wait: as each says, or lower for lower bands the fuller pods are, and by turns",
    )
    queue_timeout: Duration = param(Duration(60.0), "that a request waits before it is refused with 429", more_than=0)
    ordering: Ordering = param("fcfs", "within a tenant: who came first, whose deadline is first, or whose objective")
    fairness: Fairness = param(
        "round-robin",
        "among tenants of a band: in turn, in turn by uncached tokens, whoever has had least, or none but the ordering",
    )
    least_service: LeastService = field(default_factory=LeastService)
    shares: Mapping[str, float] = param(
        {}, "tenant -> how much of its band it gets for 1 of another, when both have requests waiting; 1 unless given"
    )
    bands: tuple[BandSettings, ...] = param((), "by priority")
    evict_sheddable: bool = param(
        False, "end requests of negative priority that are being answered, when others have no room"
    )
    shedding: Shedding = field(default_factory=Shedding)

    @property
    def limits(self) -> bool:
        """Whether anybody can ever have to wait."""
        caps = (self.max_concurrent, self.max_concurrent_per_pod, self.max_tokens, self.max_tokens_per_pod)
        return any(caps) or self.saturation.detector != "none"

    @property
    def sheds(self) -> bool:
        return self.shedding.by_load is not None or self.shedding.missed_objectives

    def part(self, workers: int) -> FlowControlSettings:
        """Of one of so many: each has its part of those that may wait. Caps are of all, and known to all."""
        if workers == 1:
            return self
        bands = tuple(
            replace(band, max_queued=None if band.max_queued is None else _part(band.max_queued, workers))
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
    """At least one, unless there should be none."""
    return -(-most // workers)


def warnings(settings: FlowControlSettings, path: str, request_seconds: float) -> Iterator[str]:
    """A sentence for each, beginning with its path. `path` is that of the section, and a request ends after
    `request_seconds` whatever it does."""
    if not settings.limits and replace(settings, shedding=FlowControlSettings().shedding) != FlowControlSettings():
        yield f"{path}: nobody ever waits, as there is no cap, such as maxConcurrentPerPod, and no detector."
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
