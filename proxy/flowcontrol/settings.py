"""The `flowControl` section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from proxy.core.params import Duration, Size, param

Ordering = Literal["fcfs", "edf", "slo-deadline"]
Fairness = Literal["strict", "round-robin", "deficit-round-robin", "least-service"]


@dataclass(frozen=True, slots=True)
class Saturation:
    """When pods count as full. `utilization` reads what pods report, `concurrency` the requests in flight on them."""

    detector: Literal["none", "utilization", "concurrency", "highest"] = param(
        "none",
        "how saturation is measured: utilization by the queues and KV caches that pods report, concurrency by the "
        "requests and tokens in flight; highest: the higher of both; none: not at all",
    )
    queue_depth: int = param(5, "with utilization: number of waiting requests at which a pod is full", at_least=1)
    kv_usage: float = param(
        0.8, "with utilization: used share of the KV cache at which a pod is full", more_than=0, at_most=1
    )
    requests: int | None = param(
        100, "with concurrency: number of requests in flight at which a pod is full; null: no limit", at_least=1
    )
    tokens: int | None = param(
        1_000_000,
        "with concurrency: uncached prompt tokens in flight at which a pod is full; null: no limit",
        at_least=1,
    )


@dataclass(frozen=True, slots=True)
class LeastService:
    """Order of tenants with the fairness `least-service`: weight x how little service a tenant received recently +
    waitWeight x how long its first request waits, both scaled to 0..1 over the waiting tenants."""

    weight: float = param(
        0.8,
        "weight of how little service a tenant received, counted as 1 per prompt token and 2 per completion token",
        at_least=0,
    )
    wait_weight: float = param(0.2, "weight of how long the first request of a tenant has waited", at_least=0)
    half_life: Duration = param(
        Duration(60.0), "time after which received service counts half; 0: it always counts fully", at_least=0
    )
    forget_after: Duration = param(
        Duration(3600.0), "time without a response after which received service is forgotten; 0: never", at_least=0
    )


@dataclass(frozen=True, slots=True)
class Holdback:
    """Ceilings of all bands, listed or not, between a ceiling for the lowest and one for the highest."""

    min_ceiling: float = param(doc="saturation from which on requests of the lowest band wait", at_least=0)
    max_ceiling: float = param(1.0, "saturation from which on requests of the highest band wait", at_most=1)
    domain: Literal["rank", "value"] = param(
        "rank", "whether ceilings in between follow the order of the bands or the values of their priorities"
    )

    def __post_init__(self) -> None:
        if self.min_ceiling >= self.max_ceiling:
            raise ValueError("minCeiling must be less than maxCeiling")

    def ceilings(self, priorities: Sequence[int]) -> list[float]:
        """Return the ceilings for priorities in descending order."""
        low, span = self.min_ceiling, self.max_ceiling - self.min_ceiling
        if len(priorities) == 1:
            return [self.max_ceiling]
        if self.domain == "rank":
            return [self.max_ceiling - place * span / (len(priorities) - 1) for place in range(len(priorities))]
        least, most = priorities[-1], priorities[0]
        return [low + (priority - least) / (most - least) * span for priority in priorities]


@dataclass(frozen=True, slots=True)
class BandSettings:
    """A band. A priority that is not listed gets a band like the next one below, or else like the lowest."""

    priority: int = param(0, "priority of the objective; the highest band goes first")
    name: str = param("", "name in metrics; default: the priority")
    max_queued: int | None = param(
        None, "largest number of waiting requests of the band; null: flowControl.maxQueued", at_least=0
    )
    max_queued_bytes: Size | None = param(
        None, "largest total size of the bodies of its waiting requests; null: flowControl.maxQueuedBytes", at_least=1
    )
    queue_timeout: Duration | None = param(
        None, "longest time that a request waits; null: flowControl.queueTimeout", more_than=0
    )
    ordering: Ordering | None = param(None, "order of the requests of a tenant; null: flowControl.ordering")
    fairness: Fairness | None = param(None, "which tenant is served next; null: flowControl.fairness")
    ceiling: float = param(1.0, "saturation from which on requests of the band wait; 1: the pods are full", at_least=0)


@dataclass(frozen=True, slots=True)
class ShedByLoad:
    queue_depth: int = param(5, "number of waiting requests at which a pod is full", at_least=1)
    kv_usage: float = param(0.8, "used share of the KV cache at which a pod is full", more_than=0, at_most=1)
    power: float = param(5.0, "exponent of the saturation in the probability of a refusal", more_than=0)
    k: float = param(300.0, "factor of the probability", more_than=0)


@dataclass(frozen=True, slots=True)
class Shedding:
    """Which requests of negative priority are refused."""

    by_load: ShedByLoad | None = param(
        None, "refuse requests of negative priority on arrival, at random with the probability k * saturation ^ power"
    )
    missed_objectives: bool = param(
        False,
        "refuse requests of negative priority that no pod is predicted to serve within their latency objectives; "
        "needs predicted-latency-producer",
    )


@dataclass(frozen=True, slots=True)
class FlowControlSettings:
    """Queues. Without a cap, a detector and `noEndpointTimeout` every request is admitted at once."""

    max_concurrent: int | None = param(
        None, "largest number of requests in flight on all pods together; further ones wait", at_least=1
    )
    max_concurrent_per_pod: int | None = param(
        None, "largest number of requests in flight on a pod; further ones wait", at_least=1
    )
    max_tokens: int | None = param(
        None,
        "largest number of uncached prompt tokens in flight on all pods together; further requests wait",
        at_least=1,
    )
    max_tokens_per_pod: int | None = param(
        None, "largest number of uncached prompt tokens in flight on a pod; further requests wait", at_least=1
    )
    saturation: Saturation = field(default_factory=Saturation)
    max_queued: int = param(5000, "largest number of waiting requests; further ones are refused with 429", at_least=0)
    max_queued_bytes: Size = param(
        Size(256 << 20),
        "largest total size of the bodies of waiting requests; further ones are refused with 429",
        at_least=1,
    )
    ceilings: Literal["fixed", "reflective"] = param(
        "fixed",
        "saturation from which on a band waits. fixed: the ceiling of the band; reflective: the fuller the pods, the "
        "lower for lower bands, which still get a share",
    )
    holdback: Holdback | None = param(None, "ceilings by priority; null: the ceiling of each band")
    queue_timeout: Duration = param(
        Duration(60.0), "longest time that a request waits; then it is refused with 429", more_than=0
    )
    no_endpoint_timeout: Duration | None = param(
        None,
        "longest time that a request waits while the pool has no ready pod; then, or at once if null, it is refused "
        "with 503",
        more_than=0,
    )
    ordering: Ordering = param(
        "fcfs", "order of the requests of a tenant: fcfs by arrival, edf by deadline, slo-deadline by latency objective"
    )
    fairness: Fairness = param(
        "round-robin",
        "which tenant of a band is served next. round-robin: tenants in turn; deficit-round-robin: in turn, by "
        "uncached tokens; least-service: the tenant with the least recent service; "
        "strict: the first request by ordering",
    )
    least_service: LeastService = field(default_factory=LeastService)
    shares: Mapping[str, float] = param(
        {}, "tenant -> its share of its band, relative to the share of other waiting tenants; default: 1"
    )
    bands: tuple[BandSettings, ...] = param((), "queues by priority")
    evict_sheddable: bool = param(
        False, "end running requests of negative priority when a request of a higher priority finds no capacity"
    )
    shedding: Shedding = field(default_factory=Shedding)

    @property
    def limits(self) -> bool:
        """Whether requests can ever wait."""
        caps = (self.max_concurrent, self.max_concurrent_per_pod, self.max_tokens, self.max_tokens_per_pod)
        return any(caps) or self.saturation.detector != "none" or self.no_endpoint_timeout is not None

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
        for index, priority in enumerate(priorities):
            if (other := priorities.index(priority)) < index:
                raise ValueError(f"bands[{index}].priority: {priority} has a band already, bands[{other}]")
        if self.holdback is not None and self.ceilings == "reflective":
            raise ValueError("holdback: has no effect with the ceilings `reflective`; keep one of them")
        for tenant, share in self.shares.items():
            if share <= 0:
                raise ValueError(f"shares.{tenant}: must be more than 0")


def _part(most: int, workers: int) -> int:
    """Round up, so that the share is at least one unless the total is 0."""
    return -(-most // workers)


def warnings(settings: FlowControlSettings, path: str, request_seconds: float) -> Iterator[str]:
    """A sentence for each, beginning with its path. `path` is that of the section, and a request ends after
    `request_seconds` whatever it does."""
    if not settings.limits and replace(settings, shedding=FlowControlSettings().shedding) != FlowControlSettings():
        yield f"{path}: requests never wait, because there is no cap, such as maxConcurrentPerPod, and no detector."
    bands = [(f"bands[{index}].", band) for index, band in enumerate(settings.bands)]
    timeouts = [("queueTimeout", settings.queue_timeout)]
    if settings.no_endpoint_timeout is not None:
        timeouts.append(("noEndpointTimeout", settings.no_endpoint_timeout))
    timeouts += [(f"{at}queueTimeout", band.queue_timeout) for at, band in bands if band.queue_timeout is not None]
    for name, seconds in timeouts:
        if seconds >= request_seconds:
            why = f"reliability.timeouts.request is {request_seconds:g} s"
            yield f"{path}.{name}: no request waits {seconds:g} s, because {why}."
    for at, band in bands:
        if band.max_queued is not None and band.max_queued > settings.max_queued:
            why = f"maxQueued is {settings.max_queued}"
            yield f"{path}.{at}maxQueued: never {band.max_queued} requests wait, because {why}."
    yield from _of_the_detector(settings, path)


def _of_the_detector(settings: FlowControlSettings, path: str) -> Iterator[str]:
    """The first band to wait does so at its ceiling."""
    saturation, cap = settings.saturation, settings.max_concurrent_per_pod
    if saturation.detector not in ("concurrency", "highest") or saturation.requests is None or cap is None:
        return
    lowest = min((band.ceiling for band in settings.bands), default=1.0)
    lowest = lowest if settings.holdback is None else settings.holdback.min_ceiling
    if settings.ceilings == "fixed" and saturation.requests * min(1.0, lowest) > cap:
        yield (
            f"{path}.saturation.requests: a pod never has {saturation.requests} requests in flight, because"
            f" maxConcurrentPerPod is {cap}."
        )
