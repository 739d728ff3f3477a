"""Usage of one key or tenant, measured against its limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from proxy.auth.settings import Limits
from proxy.core.attempt import Usage
from proxy.core.ports import Clock
from proxy.core.request import frozen

FIRST_OUTPUT = 256.0
OUTPUT_MEMORY = 0.9

Amounts = tuple[float, float, float, float, float]
"""Change of each limited quantity: requests, tokens, prompt tokens, completion tokens, tokens of a day. Prompt tokens
are weighted."""

_WHAT = (
    "requests per minute",
    "tokens per minute",
    "input tokens per minute",
    "output tokens per minute",
    "tokens per day",
)


@frozen
class ExhaustedLimit:
    """The exhausted limit, and the seconds until it allows the request."""

    what: str
    seconds: float


class UsageMeter:
    """Usage of a key or a tenant. It lives as long as it limits requests."""

    def __init__(self, kind: str, name: str, of: str, limits: Limits, clock: Clock) -> None:
        """`kind` is key or tenant, `of` is the name of the limits."""
        self.kind = kind
        self.name = name
        self.of = of
        self.running = 0
        self.elsewhere: dict[int, int] = {}
        """Requests that run in other processes, by peer."""
        self.admitted_at = -math.inf
        """Time of the last known admission, by any process."""
        self.charged_at = -math.inf
        """Time of the last known charge or correction, by any process."""
        self._clock = clock
        self._output = FIRST_OUTPUT
        self._daily: DailyBudget | None = None
        self._set(limits)

    def limit_by(self, of: str, limits: Limits) -> None:
        """Apply other limits. The usage so far still counts."""
        had = self.used()
        self.of = of
        self._set(limits)
        self.at_least(had)

    def estimate(self, prompt: int, most: int, requests: float = 1.0) -> Amounts:
        """Estimate a request with so many prompt tokens and `max_tokens` (0: no limit). `requests` is 0 if it counts
        already, for the model before this fallback."""
        output = self._output
        if 0 < most < output:
            output = float(most)
        return requests, prompt + output, prompt, output, prompt + output

    def shortage(self, wanted: Amounts, now: float) -> ExhaustedLimit | None:
        """Return the shortage that lasts longest; None if the request is within all limits."""
        most, longest, found = self.limits.concurrent_requests, 0.0, None
        if most is not None and self.running + sum(self.elsewhere.values()) >= most:
            longest, found = 1.0, f"{most} requests at the same time"
        for index, bucket in self._buckets:
            wait = bucket.wait(wanted[index], now)
            if wait > longest:
                longest, found = wait, f"{bucket.most:.0f} {_WHAT[index]}"
        return None if found is None else ExhaustedLimit(found, longest)

    def left(self, now: float) -> Iterator[tuple[str, int]]:
        """Yield what is left of each limit on the number of requests; nothing in shadow mode."""
        if self.limits.shadow:
            return
        if self.limits.concurrent_requests is not None:
            yield "concurrent", self.limits.concurrent_requests - self.running - sum(self.elsewhere.values())
        if self.requests is not None:
            yield "requests", int(self.requests.most - self.requests.used(now))

    def start(self, reserved: Amounts, now: float) -> None:
        self.running += 1
        self.admitted_at = now
        self.charge(reserved, now)

    def end(self, reserved: Amounts, usage: Usage | None, reserved_at: float, now: float) -> Amounts:
        """Replace the reservation by the usage, if there is one. Return the correction that was charged."""
        self.running -= 1
        if usage is None:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        output = usage.completion_tokens
        if output:
            self._output += (1.0 - OUTPUT_MEMORY) * (output - self._output)
        cached = usage.cached_tokens
        prompt = usage.prompt_tokens - (cached * (1.0 - self.limits.cached_token_weight) if cached else 0.0)
        _, all_tokens, prompt_tokens, completion_tokens, _ = reserved
        tokens = prompt + output - all_tokens
        return self._correct(
            (0.0, tokens, prompt - prompt_tokens, output - completion_tokens, tokens), reserved_at, now
        )

    def undo(self, reserved: Amounts, reserved_at: float, now: float) -> Amounts:
        """Return the whole reservation of a request that was sent to no pod. Return the correction, as charged."""
        self.running -= 1
        requests, tokens, prompt_tokens, completion_tokens, daily_tokens = reserved
        return self._correct((-requests, -tokens, -prompt_tokens, -completion_tokens, -daily_tokens), reserved_at, now)

    def charge(self, amounts: Sequence[float], now: float) -> None:
        self.charged_at = now
        for index, bucket in self._buckets:
            bucket.charge(amounts[index], now)

    def used(self) -> list[float]:
        """Return the usage of each quantity; 0 without a limit."""
        now, used = self._clock.now(), [0.0] * len(_WHAT)
        for index, bucket in self._buckets:
            used[index] = bucket.used(now)
        return used

    def at_least(self, used: Sequence[float]) -> None:
        """Raise the usage to what a peer reports."""
        now = self._clock.now()
        for index, bucket in self._buckets:
            bucket.at_least(used[index], now)

    @property
    def is_idle(self) -> bool:
        """Whether the meter has no usage that counts."""
        return not self.running and not self.elsewhere and not any(self.used())

    def _correct(self, correction: Amounts, reserved_at: float, now: float) -> Amounts:
        """Charge a correction, and return it. The tokens of a day that has ended are left out."""
        if self._daily is not None and reserved_at < self._daily.began_at(now):
            correction = (*correction[:4], 0.0)
        self.charge(correction, now)
        return correction

    def _set(self, limits: Limits) -> None:
        self.limits = limits
        self.counts_tokens = limits.count_tokens
        per_minute = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.input_tokens_per_minute,
            limits.output_tokens_per_minute,
        )
        now = self._clock.now()
        minutely = [None if most is None else Bucket(most, now) for most in per_minute]
        self.requests, self.tokens = minutely[:2]
        """The two limits in OpenAI's headers."""
        buckets: list[tuple[int, Bucket | DailyBudget]] = [
            (at, each) for at, each in enumerate(minutely) if each is not None
        ]
        if limits.tokens_per_day is None:
            self._daily = None
        else:
            self._daily = self._daily or DailyBudget(limits.tokens_per_day, self._clock.wall, now)
            self._daily.most = limits.tokens_per_day
            buckets.append((len(minutely), self._daily))
        self._buckets = tuple(buckets)


SECONDS_PER_DAY = 86_400.0

LATE = 60.0
"""Seconds after midnight in which peers may still report the usage of the day before: their clocks may be behind."""


class Bucket:
    """A token bucket of `most`, refilled evenly within a minute. Later corrections may overdraw it."""

    __slots__ = ("_at", "_per_second", "left", "most")

    def __init__(self, most: float, now: float) -> None:
        self.most = most
        self.left = most
        self._per_second = most / 60.0
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until the amount is available; more than the bucket holds is available when it is full."""
        most = self.most
        left = self.left + (now - self._at) * self._per_second
        missing = (amount if amount < most else most) - left
        return missing / self._per_second if missing > 0.0 else 0.0

    def charge(self, amount: float, now: float) -> None:
        """Charge an amount; a negative amount is returned to the bucket."""
        left = self.left + (now - self._at) * self._per_second
        if left > self.most:
            left = self.most
        left -= amount
        self.left = left if left < self.most else self.most
        self._at = now

    def used(self, now: float) -> float:
        """Return what has not been refilled yet."""
        self.charge(0.0, now)
        return self.most - self.left

    def at_least(self, used: float, now: float) -> None:
        """Raise the usage to what a peer reports."""
        self.charge(max(0.0, used - self.used(now)), now)

    def full_in(self, now: float) -> float:
        return self.used(now) / self._per_second


class DailyBudget:
    """A budget per day, from midnight UTC, with the methods of `Bucket`. `wall` returns Unix time in seconds.

    While the system clock is set back, the day goes on, but no longer than 24 hours by the monotonic clock: the budget
    is neither granted twice nor blocked until the wall clock has caught up.
    """

    __slots__ = ("_day", "_ignores_peers_until", "_since", "_used", "_wall", "most")

    def __init__(self, most: float, wall: Callable[[], float], now: float) -> None:
        self.most = most
        self._used = 0.0
        self._wall = wall
        self._day = wall() // SECONDS_PER_DAY
        self._since = now
        """Monotonic time at which the day was first seen."""
        self._ignores_peers_until = now

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until midnight if nothing is left; a request larger than the rest is admitted."""
        if self.used(now) < self.most:
            return 0.0
        midnight = SECONDS_PER_DAY * (self._day + 1.0) - self._wall()
        return min(midnight, self._since + SECONDS_PER_DAY - now)

    def charge(self, amount: float, now: float) -> None:
        self._used = max(0.0, self.used(now) + amount)

    def at_least(self, used: float, now: float) -> None:
        """Raise the usage to what a peer reports, unless that may be the usage of the day before."""
        own = self.used(now)
        if now >= self._ignores_peers_until:
            self._used = max(own, used)

    def began_at(self, now: float) -> float:
        """Return the monotonic time at which the day was first seen."""
        self.used(now)
        return self._since

    def used(self, now: float) -> float:
        day = self._wall() // SECONDS_PER_DAY
        if day > self._day or now - self._since >= SECONDS_PER_DAY:
            self._day, self._since, self._used = day, now, 0.0
            self._ignores_peers_until = now + LATE
        return self._used
