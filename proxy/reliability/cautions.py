"""Settings that are good each by itself, and have no effect together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proxy.reliability.settings import ReliabilitySettings


def cautions(settings: ReliabilitySettings, pools: Sequence[int]) -> Iterator[str]:
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
