"""How far forecasts have come true: what one says counts as far as those before it were right."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MEMORY = 1200.0
"""Seconds after which a forecast counts for a third of what it did."""

BENEFIT = 4.0
"""Forecasts by one replica's worth that are taken to have come true before there were any."""

MOST = 1.5
"""Times what was said that may have come and still counts: else one burst that nobody foresaw would excuse the rest."""


@dataclass(frozen=True, slots=True)
class _Said:
    due: float
    value: float
    growth: float


@dataclass(slots=True)
class Trust:
    """Of one sum. The share is the slope of what came over what was said, through nothing, the latest counting most."""

    _open: deque[_Said] = field(default_factory=deque)
    _came: float = 0.0
    _said: float = 0.0
    _seen: float | None = None

    def share(self, unit: float) -> float:
        """Of the growth that a forecast says, what is to be believed, in [0, 1]. `unit` is one replica's worth."""
        benefit = BENEFIT * unit * unit
        whole = self._said + benefit
        return min(max((self._came + benefit) / whole, 0.0), 1.0) if whole > 0 else 1.0

    def say(self, due: float, value: float, growth: float) -> None:
        """It is `value`, and will be so much more."""
        if growth > 0:
            self._open.append(_Said(due, value, growth))

    def settle(self, now: float, value: float | None) -> None:
        """It is `value`: forecasts that are due are held against it. None: nobody can tell what it would be, and those
        that are due have never been."""
        self._fade(now)
        while self._open and self._open[0].due <= now:
            said = self._open.popleft()
            if value is None:
                continue
            came = min(max(value - said.value, -said.growth), MOST * said.growth)
            self._came += came * said.growth
            self._said += said.growth**2

    def _fade(self, now: float) -> None:
        if self._seen is not None:
            kept = math.exp((self._seen - now) / MEMORY)
            self._came, self._said = self._came * kept, self._said * kept
        self._seen = now
