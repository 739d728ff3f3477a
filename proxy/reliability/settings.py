"""The `reliability` section, and warnings about settings that have no effect together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxy.core.params import Duration, param


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`first_byte` and `idle` are for streams: an answer in one piece sends its headers only when it is done, so it is
    bounded by `request`."""

    connect: Duration = param(Duration(2.0), "to establish a connection to a pod", more_than=0)
    first_byte: Duration = param(Duration(300.0), "from the request to the first byte of a stream", more_than=0)
    idle: Duration = param(Duration(60.0), "between two chunks of a stream", more_than=0)
    request: Duration = param(Duration(1800.0), "for the whole of a request", more_than=0)


Cause = Literal["connect", "reset", "500", "502", "503", "504"]


@dataclass(frozen=True, slots=True)
class Backoff:
    initial: Duration = param(Duration(0.025), "before the first retry, half of it by chance; each is twice the last")
    max: Duration = param(Duration(1.0), "at most")


@dataclass(frozen=True, slots=True)
class Retries:
    """Only before the first byte of an answer. 429 is tried on other pods, on each once; any other 4xx is final."""

    attempts: int = param(3, "pods that are given the request; one that takes no connection does not count", at_least=1)
    on: tuple[Cause, ...] = param(
        ("connect", "reset", "502", "503", "504", "500"),
        "what another pod is asked after: no connection, a connection that breaks off, and statuses; 504 is also an"
        " answer that does not begin in time",
    )
    budget_percent: float = param(
        20.0, "retries that there may be per hundred requests, and one per second more", at_least=0
    )
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """A pod that failed so many requests within the window, and as many as it served, gets none for a while; then one
    at a time, until one succeeds. What is the client's own fault does not count."""

    failures: int = param(5, "within the window that open the breaker of a pod", at_least=1)
    window: Duration = param(Duration(30.0), "for which a failure counts", more_than=0)
    open: Duration = param(Duration(10.0), "that a pod gets no requests", more_than=0)
    panic_percent: float = param(
        50.0,
        "share of the pods that answer, beyond which so many are in doubt that all are asked",
        at_least=0,
        at_most=100,
    )
    slow_start: Duration = param(
        Duration(10.0), "in which the share of a pod that comes back grows from a tenth to all of it", at_least=0
    )


@dataclass(frozen=True, slots=True)
class InferenceCheck:
    """One token is asked of a pod that has nothing to do."""

    interval: Duration = param(Duration(30.0), "between two checks of a pod", more_than=0)
    timeout: Duration = param(Duration(10.0), "for the token", more_than=0)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Checks beside the scrapes, which see pods that take no connections. A pod that has no such path, or does not take
    such requests, is not judged by it."""

    path: str | None = param("/health", "that answers 2xx while a pod is well; null: not asked")
    interval: Duration = param(Duration(5.0), "between two checks of a pod; longer in large fleets", more_than=0)
    timeout: Duration = param(Duration(1.0), "for one check", more_than=0)
    failures: int = param(2, "after each other that cast doubt on a pod", at_least=1)
    successes: int = param(1, "after each other that take it back", at_least=1)
    inference: InferenceCheck | None = param(None, "has pods generate a token now and then; {} with defaults")
    stall: Duration = param(
        Duration(30.0), "in which requests wait for a pod and none of its counters moves: its engine hangs", more_than=0
    )


@dataclass(frozen=True, slots=True)
class Drain:
    settle: Duration = param(
        Duration(5.0), "in which new requests are still served when kvlane is told to stop, as balancers notice late"
    )
    grace: Duration = param(Duration(120.0), "that running requests have to end after that")


@dataclass(frozen=True, slots=True)
class ContinuationSettings:
    """When a pod dies in the middle of a stream of plain text, another one goes on with it."""

    models: tuple[str, ...] = param((), "for which it does, as pods call them: exact, or patterns with `*`")


@dataclass(frozen=True, slots=True)
class HedgingSettings:
    """A request whose answer does not begin in time is sent to a second pod too, and answered by whichever begins."""

    after: Duration | None = param(
        None, "without a first byte, that a request gets a second pod; null: as percentile says", more_than=0
    )
    percentile: float = param(
        95.0,
        "of the recent times to the first byte of its model, streams apart, after which it is late",
        at_least=50,
        at_most=99.9,
    )
    priority_at_least: int = param(0, "of the requests that get one")
    budget_percent: float = param(5.0, "second legs that there may be per hundred legs", at_least=0, at_most=100)


@dataclass(frozen=True, slots=True)
class ReliabilitySettings:
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    drain: Drain = field(default_factory=Drain)
    continuation: ContinuationSettings = field(default_factory=ContinuationSettings)
    hedging: HedgingSettings | None = param(None, "two pods for what is late; {} with defaults")


def warnings(settings: ReliabilitySettings, pools: Sequence[int]) -> Iterator[str]:
    """A sentence for each, beginning with its path. `pools`: how many pods there will ever be in each; 0 if nobody
    knows."""
    timeouts, breaker, health = settings.timeouts, settings.breaker, settings.health
    for name, seconds in (("connect", timeouts.connect), ("firstByte", timeouts.first_byte), ("idle", timeouts.idle)):
        if seconds >= timeouts.request:
            yield _never(f"timeouts.{name}", seconds, "timeouts.request", timeouts.request)
    for name, seconds in (("firstByte", timeouts.first_byte), ("request", timeouts.request)):
        if health.stall >= seconds:
            yield _never("health.stall", health.stall, f"timeouts.{name}", seconds)
            break
    if health.path is not None and health.timeout >= timeouts.request:
        yield _never("health.timeout", health.timeout, "timeouts.request", timeouts.request)
    hedging = settings.hedging
    for name, seconds in (("firstByte", timeouts.first_byte), ("request", timeouts.request)):
        if hedging is not None and hedging.after is not None and hedging.after >= seconds:
            yield _never("hedging.after", hedging.after, f"timeouts.{name}", seconds)
            break
    backoff = settings.retries.backoff
    if backoff.initial > backoff.max:
        yield f"reliability.retries.backoff.initial: {backoff.initial:g} s is never waited: max is {backoff.max:g} s."
    retries = settings.retries
    if settings.continuation.models and (retries.attempts == 1 or "reset" not in retries.on):
        yield "reliability.continuation.models: no stream goes on, as that is a retry after a reset, and there is none."
    if breaker.panic_percent == 0:
        yield "reliability.breaker.panicPercent: 0 has every pod asked, whatever is known of it: no breaker ever opens."
    for pods in sorted({pods for pods in pools if pods > 1 and 0 < breaker.panic_percent * pods < 100}):
        yield (
            f"reliability.breaker.panicPercent: of {pods} pods one is more than {breaker.panic_percent:g} %, so no pod "
            "is ever left alone."
        )


def _never(path: str, seconds: float, other: str, sooner: float) -> str:
    return f"reliability.{path}: {seconds:g} s never pass, as reliability.{other} is {sooner:g} s."
