"""Preferred ratios: read without ever failing, and turned into bounds in replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.autoscale.policy import Role
from proxy.autoscale.projection import EXACT
from proxy.autoscale.readings import number

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Band:
    """Parts of the total, in [0, 1]."""

    low: float = 0.0
    high: float = 1.0

    def holds(self, replicas: int, total: int) -> bool:
        return self.low * total - EXACT <= replicas <= self.high * total + EXACT


OPEN = Band()


def read(written: Any, roles: Sequence[Role]) -> tuple[dict[str, Band], bool]:
    """The bands of roles that have one, clipped to what is possible, and whether something that was written is none: of
    no role, not numeric, inverted, or wholly impossible."""
    if not isinstance(written, Mapping):
        return {}, bool(written)
    names = {role.name for role in roles}
    found = {name: band for name, one in written.items() if name in names and (band := _band(one))}
    return found, len(found) < len(written)


def least_total(bands: Mapping[str, Band], asked: Mapping[str, int]) -> int:
    """The smallest total of which each role may have what it asks for."""
    within = [math.ceil(asked[name] / one.high - EXACT) for name, one in bands.items() if one.high > 0]
    return max(sum(asked.values()), *within, 0)


def contradictory(bands: Mapping[str, Band], roles: Sequence[Role]) -> bool:
    """Whatever the total is."""
    low = math.fsum(bands.get(role.name, OPEN).low for role in roles)
    high = math.fsum(bands.get(role.name, OPEN).high for role in roles)
    return low > 1 + EXACT or high < 1 - EXACT


def bounds(role: Role, band: Band, total: int, *, whole: bool) -> Bounds:
    """Lowest and highest count of replicas inside both the band and the role's own bounds. `whole`: the outermost whole
    numbers of the band, where it has any. Where both exclude each other it is the role's own bound next to the band."""
    low, high = band.low * total, band.high * total
    if whole and (first := math.ceil(low - EXACT)) <= (last := math.floor(high + EXACT)):
        low, high = first, last
    if high < role.min:
        return role.min, role.min
    if low > role.max:
        return role.max, role.max
    return max(low, role.min), min(high, role.max)


def hindered(bands: Mapping[str, Band], roles: Sequence[Role], total: int) -> bool:
    """Whether the roles' own bounds keep a total from being divided within the bands, replicas being divisible."""
    found = [bounds(role, bands.get(role.name, OPEN), total, whole=False) for role in roles]
    return (
        any(
            not role.min <= band.high * total + EXACT or not role.max >= band.low * total - EXACT
            for role in roles
            if (band := bands.get(role.name))
        )
        or math.fsum(low for low, _ in found) > total + EXACT
        or math.fsum(high for _, high in found) < total - EXACT
    )


def _band(written: Any) -> Band | None:
    if not isinstance(written, Mapping):
        return None
    low, high = number(written.get("min")), number(written.get("max"))
    if low is None or high is None or low > high or high < 0 or low > 100:
        return None
    return Band(max(low, 0.0) / 100, min(high, 100.0) / 100)
