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
"""What a request takes, or gives back, of each limit: requests, tokens, tokens of prompts, of answers, tokens of a day.
Those of prompts are weighed."""

_WHAT = (
    "requests per minute",
    "tokens per minute",
    "input tokens per minute",
    "output tokens per minute",
    "tokens per day",
)


@frozen
class Shortage:
    """What there is not enough of, and in how many seconds there will be."""

    what: str
    seconds: float


class Meter:
    """Lives as long as somebody is limited by it."""

    def __init__(self, kind: str, name: str, of: str, limits: Limits, clock: Clock) -> None:
        """`kind` says whether it is of a key or of a tenant, `of` is the name of the limits."""
        self.kind = kind
        self.name = name
        self.of = of
        self.running = 0
        self.elsewhere: dict[int, int] = {}
        """Requests that run in other workers, by worker."""
        self.let_in_at = -math.inf
        """When it is known that somebody was, by whatever worker."""
        self._clock = clock
        self._output = FIRST_OUTPUT
        self._set(limits)

    def limit_by(self, of: str, limits: Limits) -> None:
        """Apply other limits from here on. What was used so far still counts."""
        had = self.used()
        self.of = of
        self._set(limits)
        self.at_least(had)

    def estimate(self, prompt: int, most: int) -> Amounts:
        """Of a request that may take at most so many tokens for its answer (0: it does not say)."""
        output = self._output
        if 0 < most < output:
            output = float(most)
        return 1.0, prompt + output, prompt, output, prompt + output

    def shortage(self, wanted: Amounts, now: float) -> Shortage | None:
        """The one that lasts longest; None if the request may go on."""
        most = self.limits.concurrent_requests
        if most is not None and self.running + sum(self.elsewhere.values()) >= most:
            return Shortage(f"{most} requests at the same time", 1.0)
        longest, found = 0.0, None
        for index, bucket in self._buckets:
            wait = bucket.wait(wanted[index], now)
            if wait > longest:
                longest, found = wait, f"{bucket.most:.0f} {_WHAT[index]}"
        return None if found is None else Shortage(found, longest)

    def left(self, now: float) -> Iterator[tuple[str, int]]:
        """Of each limit on the number of requests, as far as is known; nothing where it only counts."""
        if self.limits.shadow:
            return
        if self.limits.concurrent_requests is not None:
            yield "concurrent", self.limits.concurrent_requests - self.running - sum(self.elsewhere.values())
        if self.requests is not None:
            yield "requests", int(self.requests.most - self.requests.used(now))

    def begin(self, reserved: Amounts, now: float) -> None:
        self.running += 1
        self.let_in_at = now
        self.charge(reserved, now)

    def end(self, reserved: Amounts, usage: Usage | None, now: float) -> Amounts:
        """Gives back what was not needed: returned, as it was charged. A request of which nobody knows how many tokens
        it took costs what was reserved."""
        self.running -= 1
        if usage is None:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        output = usage.completion_tokens
        if output:
            self._output += (1.0 - OUTPUT_MEMORY) * (output - self._output)
        cached = usage.cached_tokens
        prompt = usage.prompt_tokens - (cached * (1.0 - self.limits.cached_token_weight) if cached else 0.0)
        _, all_tokens, of_prompt, of_answer, _ = reserved
        tokens = prompt + output - all_tokens
        correction = 0.0, tokens, prompt - of_prompt, output - of_answer, tokens
        self.charge(correction, now)
        return correction

    def undo(self, reserved: Amounts, now: float) -> Amounts:
        """As `end`, for a request that came to no pod."""
        self.running -= 1
        requests, tokens, of_prompt, of_answer, of_day = reserved
        correction = -requests, -tokens, -of_prompt, -of_answer, -of_day
        self.charge(correction, now)
        return correction

    def charge(self, amounts: Sequence[float], now: float) -> None:
        for index, bucket in self._buckets:
            bucket.take(amounts[index], now)

    def used(self) -> list[float]:
        """Of each limit; 0 of those that there are not."""
        now, used = self._clock.now(), [0.0] * len(_WHAT)
        for index, bucket in self._buckets:
            used[index] = bucket.used(now)
        return used

    def at_least(self, used: Sequence[float]) -> None:
        """Somebody else knows that so much was had."""
        now = self._clock.now()
        for index, bucket in self._buckets:
            bucket.take(max(0.0, used[index] - bucket.used(now)), now)

    @property
    def is_idle(self) -> bool:
        """Whether it may be forgotten."""
        return not self.running and not self.elsewhere and not any(self.used())

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
        """What OpenAI's headers tell of."""
        buckets: list[tuple[int, Bucket | Day]] = [(at, each) for at, each in enumerate(minutely) if each is not None]
        if limits.tokens_per_day is not None:
            buckets.append((len(minutely), Day(limits.tokens_per_day, self._clock.wall)))
        self._buckets = tuple(buckets)


SECONDS_PER_DAY = 86_400.0


class Bucket:
    """Refills evenly, `most` in `seconds`, and holds no more. May be overdrawn by what is only known later."""

    __slots__ = ("_at", "_per_second", "left", "most")

    def __init__(self, most: float, now: float, seconds: float = 60.0) -> None:
        self.most = most
        self.left = most
        self._per_second = most / seconds
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much can be taken; what is more than it ever holds can be taken when it is full."""
        most = self.most
        left = self.left + (now - self._at) * self._per_second
        missing = (amount if amount < most else most) - left
        return missing / self._per_second if missing > 0.0 else 0.0

    def take(self, amount: float, now: float) -> None:
        """Less than nothing gives back."""
        left = self.left + (now - self._at) * self._per_second
        if left > self.most:
            left = self.most
        left -= amount
        self.left = left if left < self.most else self.most
        self._at = now

    def used(self, now: float) -> float:
        """What has not been refilled yet."""
        self.take(0.0, now)
        return self.most - self.left

    def full_in(self, now: float) -> float:
        """Seconds until nothing of the past counts any more."""
        return self.used(now) / self._per_second


class Day:
    """A budget from midnight UTC to midnight UTC. It has the methods of a bucket and a clock of its own: `wall` gives
    seconds since the Unix epoch."""

    __slots__ = ("_day", "_used", "_wall", "most")

    def __init__(self, most: float, wall: Callable[[], float]) -> None:
        self.most = most
        self._used = 0.0
        self._day = -1.0
        self._wall = wall

    def wait(self, amount: float, now: float) -> float:
        """Seconds until something can be taken: a request that is larger than what is left is taken, if anything is."""
        return 0.0 if self.used(now) < self.most else SECONDS_PER_DAY * (self._day + 1.0) - self._wall()

    def take(self, amount: float, now: float) -> None:
        self._used = max(0.0, self.used(now) + amount)

    def used(self, now: float) -> float:
        day = self._wall() // SECONDS_PER_DAY
        if day != self._day:
            self._day, self._used = day, 0.0
        return self._used
