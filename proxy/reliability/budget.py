"""How many retries there may be, so that they do not make an outage worse."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.ports import Clock

PER_SECOND = 1.0
"""Retries that are always allowed, so that services with little traffic have some."""

MOST = 100.0
"""Retries that can be saved up."""


class RetryBudget:
    """A share of the legs that are sent, with a little on top; see the retry budgets of Finagle and Envoy.

    `legs` says how many were sent so far. It is asked when there is something to retry, so a request without trouble
    pays nothing.
    """

    def __init__(
        self, percent: float, clock: Clock, legs: Callable[[], int], per_second: float = PER_SECOND, most: float = MOST
    ) -> None:
        self._per_second = per_second
        self._most = most
        self._percent = percent
        self._clock = clock
        self._legs = legs
        self._seen = legs()
        self._seen_at = clock.now()
        self._left = most

    @property
    def percent(self) -> float:
        """Percent of the attempts that may be retries. What has been saved up stays when it changes."""
        return self._percent

    @percent.setter
    def percent(self, percent: float) -> None:
        self._earn()
        self._percent = percent

    @property
    def has_one(self) -> bool:
        self._earn()
        return self._left >= 1.0

    def spend(self) -> bool:
        """False if nothing is left."""
        if not self.has_one:
            return False
        self._left -= 1.0
        return True

    def _earn(self) -> None:
        legs, now = self._legs(), self._clock.now()
        earned = self._percent / 100 * (legs - self._seen) + self._per_second * (now - self._seen_at)
        self._left = min(self._most, self._left + earned)
        self._seen, self._seen_at = legs, now
