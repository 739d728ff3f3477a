"""How fast requests end, and so how long those that wait will wait."""

from __future__ import annotations

from math import exp

from proxy.core.ports import Clock

MEMORY = 10.0
"""Seconds in which the past shrinks to 1/e."""

LEAST_KNOWN = 5.0
"""Endings that have to be remembered before anything is predicted."""


class DrainRate:
    """Endings per second, of late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0.0
        self._at = clock.now()
        self._began = clock.now()

    def ended(self) -> None:
        self._fade()
        self._count += 1.0

    def wait(self, ahead: int) -> float | None:
        """Seconds until so many have gone on and one more; None while too little is known."""
        self._fade()
        if self._count < LEAST_KNOWN:
            return None
        known = MEMORY * (1.0 - exp((self._began - self._at) / MEMORY))
        return (ahead + 1) * known / self._count

    def _fade(self) -> None:
        now = self._clock.now()
        self._count *= exp((self._at - now) / MEMORY)
        self._at = now
