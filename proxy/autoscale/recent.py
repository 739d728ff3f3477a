"""A percentile of what was counted of late, out of a histogram that only ever grows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from proxy.autoscale.quantile import Buckets, quantile_between

WINDOW = 30.0
"""Seconds."""

PERCENTILE = 90.0


@dataclass(slots=True)
class Recent:
    _looks: deque[tuple[float, Buckets]] = field(default_factory=deque)

    def look(self, now: float, buckets: Buckets) -> float | None:
        """Over the last WINDOW seconds, or since the first look while that is less; None while nothing was counted. It
        begins anew where the histogram does."""
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - WINDOW:
            looks.popleft()
        try:
            found = quantile_between(PERCENTILE, buckets, looks[0][1] if looks else buckets)
        except ValueError:
            looks.clear()
            found = None
        looks.append((now, list(buckets)))
        return found
