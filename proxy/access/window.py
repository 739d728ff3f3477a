"""How much of something there was of late, against how much there may be. Times are monotonic seconds.

Both are looked at and taken from by every request of a key that has limits, so neither calls anything.
"""

from __future__ import annotations

from collections.abc import Callable

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
