"""A percentile of what was counted of late, out of a histogram that only ever grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.autoscale.quantile import Buckets, quantile_between
from proxy.autoscale.settings import PoolSettings

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


class ScaledPools:
    """The pools that are scaled, and the recent percentile of each of their roles."""

    def __init__(self) -> None:
        self._pools: Mapping[str, PoolSettings] = {}
        self._recent: dict[tuple[str, str], Recent] = {}
        self.roles: tuple[tuple[str, str], ...] = ()
        """Pools and roles."""

    @property
    def pools(self) -> Mapping[str, PoolSettings]:
        """The settings by pool. Where they change, the past of roles that are gone is dropped."""
        return self._pools

    @pools.setter
    def pools(self, pools: Mapping[str, PoolSettings]) -> None:
        self._pools = pools
        self.roles = tuple((name, role.name) for name, pool in pools.items() for role in pool.roles)
        for gone in self._recent.keys() - set(self.roles):
            del self._recent[gone]

    def recent(self, pool: str, role: str, now: float, buckets: Buckets) -> float | None:
        """Return what `Recent.look` does for the role."""
        return self._recent.setdefault((pool, role), Recent()).look(now, buckets)
