"""Replicas from shares: within bounds, of a fixed sum, in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = 1e-9
"""Part of the sum below which a share counts as 0."""

EXACT = 1e-7
"""What a replica count may be off a whole number, by the way floats add up, and still be one."""


def project(quotas: Sequence[float], low: Sequence[float], high: Sequence[float], total: float) -> list[float]:
    """x_i = clip(k * quota_i, low_i, high_i) with the one factor k for which they sum to `total`, so that those that no
    bound stops keep their proportions. Needs sum(low) <= total <= sum(high). Quotas of 0 stay low until all others are
    high, and then share what is left by the room they have."""
    largest = max(quotas, default=0.0) or 1.0
    quotas = [quota / largest for quota in quotas]
    cut = NOTHING * math.fsum(quotas)
    scaled = [index for index, quota in enumerate(quotas) if quota > cut]
    others = [index for index, quota in enumerate(quotas) if quota <= cut]
    found = [float(bound) for bound in low]
    rest = total - math.fsum(low[index] for index in others)
    most = math.fsum(high[index] for index in scaled)
    if not scaled or rest >= most:
        for index in scaled:
            found[index] = float(high[index])
        _share_by_room(found, others, high, rest - most)
    else:
        _scale(found, scaled, quotas, low, high, rest)
    return found


def round_bounded(values: Sequence[float], total: int, names: Sequence[str]) -> list[int]:
    """Whole numbers that sum to `total` as `values` do, each its value rounded down or up: up those with the largest
    remainders, of equal ones those whose names come first. Bounds that are whole numbers are kept."""
    near = [float(round(value)) if abs(value - round(value)) <= EXACT else value for value in values]
    floors = [math.floor(value) for value in near]
    by_remainder = sorted(range(len(near)), key=lambda at: (-round(near[at] - floors[at], 7), names[at]))
    for index in by_remainder[: max(total - sum(floors), 0)]:
        floors[index] += 1
    return floors


def _share_by_room(found: list[float], others: Sequence[int], high: Sequence[float], rest: float) -> None:
    room = math.fsum(high[index] - found[index] for index in others)
    for index in others if room > 0 else ():
        found[index] += (high[index] - found[index]) * min(max(rest / room, 0.0), 1.0)


def _scale(
    found: list[float],
    scaled: Sequence[int],
    quotas: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    rest: float,
) -> None:
    """The sum grows with k, in straight lines between the values of k at which a bound begins or ends to hold."""
    knots = sorted({bound[index] / quotas[index] for index in scaled for bound in (low, high)})
    before = 0.0
    for knot in knots:
        if math.fsum(min(max(knot * quotas[at], low[at]), high[at]) for at in scaled) >= rest:
            break
        before = knot
    else:
        knot = knots[-1]
    free = [at for at in scaled if low[at] / quotas[at] <= before and high[at] / quotas[at] >= knot]
    for at in scaled:
        found[at] = float(high[at] if high[at] / quotas[at] <= before else low[at])
    fixed = math.fsum(found[at] for at in scaled if at not in free)
    weight = math.fsum(quotas[at] for at in free)
    for at in free:
        found[at] = min(max((rest - fixed) * quotas[at] / weight, low[at]), high[at])
