"""The `reliability` section, and warnings about settings that have no effect together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxy.core.params import Duration, check_path, param


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of requests to pods. `firstByte` and `idle` apply to streams; a response in one piece sends its headers
    when it is complete, so only `request` bounds it."""

    connect: Duration = param(Duration(2.0), "time to establish a connection to a pod", more_than=0)
    first_byte: Duration = param(
        Duration(300.0),
        "time from the choice of a pod, connecting included, to the first byte of a stream; each retry has its own",
        more_than=0,
    )
    idle: Duration = param(
        Duration(60.0), "time between two chunks of a stream of events, on any path that is relayed", more_than=0
    )
    request: Duration = param(Duration(1800.0), "total time of a request, unless the client requests less", more_than=0)


Cause = Literal["connect", "reset", "500", "502", "503", "504"]


@dataclass(frozen=True, slots=True)
class Backoff:
    initial: Duration = param(
        Duration(0.025), "delay before the first retry, with jitter of 50 %; it doubles with each retry"
    )
    max: Duration = param(Duration(1.0), "largest delay before a retry")


@dataclass(frozen=True, slots=True)
class Retries:
    """Retries before a response has started. A 429 is always a cause, and so are a 404 for a model that another pod
    lists and a 400 for a data-parallel rank that the pod does not have; other statuses are only if `on` names them. All
    are within `attempts` and the budget."""

    attempts: int = param(
        3,
        "largest number of attempts; a connection that could not be established does not count while an untried pod is"
        " left",
        at_least=1,
    )
    on: tuple[Cause, ...] = param(
        ("connect", "reset", "502", "503", "504", "500"),
        "causes of a retry: connect (no connection, also after timeouts.connect), reset (any other failure without a "
        "status, also timeouts.idle of a stream that can be continued), and statuses; 504 includes a response that "
        "does not start within timeouts.firstByte",
    )
    budget_percent: float = param(
        20.0,
        "retries per hundred attempts, in addition to one per second; up to 100 unused ones are kept",
        at_least=0,
    )
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Circuit breaker of a pod. It opens when failures within the window reach `failures` and are at least as many as
    the successes. Later it lets single requests pass and closes after the first success. Errors of clients do not
    count."""

    failures: int = param(5, "failures within the window that open the breaker", at_least=1)
    window: Duration = param(Duration(30.0), "time for which a failure counts", more_than=0)
    open: Duration = param(Duration(10.0), "time for which an open breaker blocks all requests to the pod", more_than=0)
    panic_percent: float = param(
        50.0,
        "panic threshold: if more than this share of the live pods is ejected, ejections are ignored; 0 "
        "ignores every ejection",
        at_least=0,
        at_most=100,
    )
    slow_start: Duration = param(
        Duration(10.0), "time in which the share of a returning pod grows from a tenth to its full share", at_least=0
    )


@dataclass(frozen=True, slots=True)
class InferenceCheck:
    """A completion of one token, requested of idle pods."""

    interval: Duration = param(Duration(30.0), "time between two checks of a pod", more_than=0)
    timeout: Duration = param(Duration(10.0), "time for the token", more_than=0)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Active health checks. Scrapes detect pods that accept no connections; these checks detect other failures. A pod
    without the path, or which does not serve completions, is not ejected by the check."""

    path: str | None = param("/health", "path that responds with 2xx while a pod is healthy; null: no check")
    interval: Duration = param(Duration(5.0), "time between two checks of a pod; longer in large fleets", more_than=0)
    timeout: Duration = param(Duration(1.0), "timeout of one check", more_than=0)
    failures: int = param(2, "consecutive failures that eject a pod", at_least=1)
    successes: int = param(1, "consecutive successes that end the ejection", at_least=1)
    inference: InferenceCheck | None = param(
        None, "request a token from idle pods regularly; {} uses the defaults; null: no check"
    )
    stall: Duration = param(
        Duration(30.0),
        "time without progress of any counter, while requests wait, after which the engine of a pod counts as hung",
        more_than=0,
    )

    def __post_init__(self) -> None:
        if self.path is not None:
            check_path(self.path)


@dataclass(frozen=True, slots=True)
class Drain:
    settle: Duration = param(
        Duration(5.0), "how long to keep accepting requests after SIGTERM, so that load balancers can notice"
    )
    grace: Duration = param(Duration(120.0), "how long running requests may continue after that")


@dataclass(frozen=True, slots=True)
class ContinuationSettings:
    """Continuation of streams: if a pod fails during a stream of plain text, another pod continues the text."""

    models: tuple[str, ...] = param(
        (), "models whose streams are continued, by the names that pods use; `*` is a wildcard"
    )


@dataclass(frozen=True, slots=True)
class HedgingSettings:
    """Hedged requests: a request whose response does not start in time is also sent to a second pod; the client
    receives the response that starts first."""

    after: Duration | None = param(
        None, "time without a first byte after which a hedged attempt starts; null: by percentile", more_than=0
    )
    percentile: float = param(
        95.0,
        "percentile of recent times to first byte of the same model and kind (stream or not) after which a "
        "hedged attempt starts",
        at_least=50,
        at_most=99.9,
    )
    priority_at_least: int = param(0, "lowest priority of requests that are hedged")
    budget_percent: float = param(5.0, "hedged attempts per hundred attempts", at_least=0, at_most=100)


@dataclass(frozen=True, slots=True)
class ReliabilitySettings:
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    drain: Drain = field(default_factory=Drain)
    continuation: ContinuationSettings = field(default_factory=ContinuationSettings)
    hedging: HedgingSettings | None = param(None, "hedged requests; {} uses the defaults; null: off")


def warnings(settings: ReliabilitySettings, pools: Sequence[int]) -> Iterator[str]:
    """A sentence for each, beginning with its path. `pools`: how many pods there will ever be in each; 0 if that
    is not known."""
    timeouts, breaker, health = settings.timeouts, settings.breaker, settings.health
    whole: Mapping[str, float] = {"timeouts.request": timeouts.request}
    both = {"timeouts.firstByte": timeouts.first_byte, **whole}
    for name, seconds in (("connect", timeouts.connect), ("firstByte", timeouts.first_byte), ("idle", timeouts.idle)):
        yield from _never(f"timeouts.{name}", seconds, whole)
    yield from _never("health.stall", health.stall, both)
    if health.path is not None:
        yield from _never("health.timeout", health.timeout, whole)
    if timeouts.connect > 60.0:
        yield (
            f"reliability.timeouts.connect: {timeouts.connect:g} s are long for a connection; "
            "a number without a unit is in seconds."
        )
    if settings.hedging is not None and settings.hedging.after is not None:
        yield from _never("hedging.after", settings.hedging.after, both)
    backoff = settings.retries.backoff
    if backoff.initial > backoff.max:
        never = f"the delay is never {backoff.initial:g} s, because max is {backoff.max:g} s"
        yield f"reliability.retries.backoff.initial: {never}."
    retries = settings.retries
    if settings.continuation.models and (retries.attempts == 1 or "reset" not in retries.on):
        why = "retries.attempts is 1" if retries.attempts == 1 else "retries.on lacks reset"
        yield f"reliability.continuation.models: streams are not continued, because {why}."
    if breaker.panic_percent == 0:
        yield "reliability.breaker.panicPercent: 0 ignores every ejection, so failing pods still get requests."
    for pods in sorted({pods for pods in pools if pods > 1 and 0 < breaker.panic_percent * pods < 100}):
        yield (
            f"reliability.breaker.panicPercent: one of {pods} pods is more than {breaker.panic_percent:g} %, so "
            "ejections are always ignored."
        )


def _never(path: str, seconds: float, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield a warning if one of the limits, by path, is reached first."""
    for other, sooner in limits.items():
        if seconds >= sooner:
            yield f"reliability.{path}: {seconds:g} s have no effect, because reliability.{other} is {sooner:g} s."
            return
