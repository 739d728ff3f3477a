"""Distribution of a total of replicas over roles. Pure functions, which never raise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.autoscale.policy import EXPANSION, SATURATION, Cause, Coordination, Result, Role, number, of_role, reading


def distribute(
    roles: Sequence[Role],
    coordination: Coordination,
    total: int,
    metrics: Any,
    panic: bool = False,
    expansion: float = EXPANSION,
) -> Result:
    """Return the replicas of each role. They sum to the total as far as the bounds of the roles allow it, and keep
    those bounds; preferred ratios are kept where whole numbers can keep them. Roles have unique names and min <= max.
    `metrics` are {role: {signal: value}}, each per ready replica; an absent or invalid value is missing, and missing is
    not 0. `expansion`: see `cost.cost_baseline`."""
    roles = bounded(roles, coordination, total)
    total = within(roles, total)
    base = cost_baseline(roles, total, expansion)
    if coordination.mode != "preferred":
        return Result(base, total, "off")
    if panic:
        return Result(_in_panic(roles, coordination, total, base, expansion), total, "panic", (Cause.PANIC,))
    if total == 0:
        return Result(base, total, "preferred", band_satisfied=True)
    return _preferred(roles, coordination, total, metrics, base)


def bounded(roles: Sequence[Role], coordination: Coordination, total: int) -> list[Role]:
    """Return the roles with coupled bounds: coupled roles have at least one replica each as soon as one of them has."""
    if not coordination.coupled or within(roles, total) <= 0:
        return list(roles)
    return [dataclasses.replace(role, min=max(role.min, 1)) for role in roles]


def within(roles: Sequence[Role], total: int) -> int:
    return min(max(total, sum(role.min for role in roles)), sum(role.max for role in roles))


def _in_panic(
    roles: Sequence[Role], coordination: Coordination, total: int, base: dict[str, int], expansion: float
) -> dict[str, int]:
    """Return the distribution in panic. Distribution by cost alone could take replicas from the role that needs them
    most."""
    held = [dataclasses.replace(role, min=min(max(role.current or 0, role.min), role.max)) for role in roles]
    if coordination.panic_hold and sum(role.min for role in held) <= total:
        return cost_baseline(held, total, expansion)
    return base


def _preferred(
    roles: Sequence[Role], coordination: Coordination, total: int, metrics: Any, base: dict[str, int]
) -> Result:
    names = [role.name for role in roles]
    baseline = _baseline(roles, coordination, base, total)
    pressure = pressures(roles, coordination, metrics, baseline)
    alpha = coordination.alpha
    blended = [(1 - alpha) * own + alpha * pressed for own, pressed in zip(baseline, pressure.shares, strict=True)]
    bands, ignored = read_bands(coordination.preferred_ratio, roles)
    limits = _limits(roles, bands, total)
    target = _projected([share * total for share in blended], limits, roles, total)
    replicas, held = _replicas_near(roles, coordination, target, limits, total)
    satisfied = all(one.holds(replicas[name], total) for name, one in bands.items())
    reasons = pressure.reasons | ({Cause.BAND_IGNORED} if ignored else set()) | held
    if not satisfied:
        reasons = reasons | {_hindrance(roles, bands, total)}
    return Result(
        replicas=replicas,
        total=total,
        applied="preferred",
        reasons=tuple(reason for reason in Cause if reason in reasons),
        band_satisfied=satisfied,
        baseline_share=dict(zip(names, baseline, strict=True)),
        pressure=dict(zip(names, pressure.of_roles, strict=True)),
        pressure_share=dict(zip(names, pressure.shares, strict=True)),
        blended_share=dict(zip(names, blended, strict=True)),
        target=dict(zip(names, target, strict=True)),
    )


def _baseline(roles: Sequence[Role], coordination: Coordination, base: dict[str, int], total: int) -> list[float]:
    """Return the baseline; that of the cost if its inputs are unknown or zero."""
    known = [_of_baseline(role, coordination) for role in roles]
    counts = [count for count in known if count is not None]
    largest = max(counts, default=0.0)
    if len(counts) < len(roles) or largest <= 0:
        return [base[role.name] / total for role in roles]
    whole = math.fsum(count / largest for count in counts)
    return [count / largest / whole for count in counts]


def _of_baseline(role: Role, coordination: Coordination) -> float | None:
    if coordination.baseline == "weights":
        return role.weight
    if coordination.baseline == "current":
        return role.current
    return role.demand if coordination.baseline == "demand" else None


def _limits(roles: Sequence[Role], bands: dict[str, ShareBand], total: int) -> list[Bounds]:
    """Return the limits in whole numbers, unless the total does not fit between these."""
    for whole in (True, False):
        limits = [band_bounds(role, bands.get(role.name, OPEN), total, whole=whole) for role in roles]
        if _lowest(limits) <= total + EXACT and _highest(limits) >= total - EXACT:
            break
    return limits


def _projected(quotas: Sequence[float], limits: Sequence[Bounds], roles: Sequence[Role], total: int) -> list[float]:
    """Return the target. If the limits have no solution for the total, relax them in proportion, within the roles' own
    bounds."""
    low, high = [low for low, _ in limits], [high for _, high in limits]
    if _lowest(limits) > total:
        return project(low, [role.min for role in roles], low, total)
    if _highest(limits) < total:
        return project(high, high, [role.max for role in roles], total)
    return project(quotas, low, high, total)


def _replicas_near(
    roles: Sequence[Role], coordination: Coordination, target: Sequence[float], limits: Sequence[Bounds], total: int
) -> tuple[dict[str, int], set[Cause]]:
    """Return the whole numbers next to the target, or the current replicas if they are near enough."""
    names = [role.name for role in roles]
    replicas = round_bounded(target, total, names)
    current = [role.current for role in roles if role.current is not None]
    slack = 0.5 + coordination.hysteresis_percent / 100 * total + EXACT
    if (
        current != replicas
        and len(current) == len(roles)
        and sum(current) == total
        and all(low - EXACT <= count <= high + EXACT for count, (low, high) in zip(current, limits, strict=True))
        and all(abs(aim - count) <= slack for aim, count in zip(target, current, strict=True))
    ):
        return dict(zip(names, current, strict=True)), {Cause.HYSTERESIS}
    return dict(zip(names, replicas, strict=True)), set()


def _hindrance(roles: Sequence[Role], bands: dict[str, ShareBand], total: int) -> Cause:
    if are_contradictory(bands, roles):
        return Cause.INFEASIBLE
    return Cause.CLAMPED if are_hindered(bands, roles, total) else Cause.ROUNDING


def _lowest(limits: Sequence[Bounds]) -> float:
    return math.fsum(low for low, _ in limits)


def _highest(limits: Sequence[Bounds]) -> float:
    return math.fsum(high for _, high in limits)


Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ShareBand:
    """Lower and upper part of the total, in [0, 1]."""

    low: float = 0.0
    high: float = 1.0

    def holds(self, replicas: int, total: int) -> bool:
        return self.low * total - EXACT <= replicas <= self.high * total + EXACT


OPEN = ShareBand()


def read_bands(written: Any, roles: Sequence[Role]) -> tuple[dict[str, ShareBand], bool]:
    """Return the bands of roles, clipped to possible values, and whether a band is ignored: of an unknown role, not
    numeric, inverted, or impossible."""
    if not isinstance(written, Mapping):
        return {}, bool(written)
    names = {role.name for role in roles}
    found = {name: band for name, one in written.items() if name in names and (band := _band(one))}
    return found, len(found) < len(written)


def least_total(bands: Mapping[str, ShareBand], wanted: Mapping[str, int]) -> int:
    """Return the smallest total that gives each role its demand."""
    within = [math.ceil(wanted[name] / one.high - EXACT) for name, one in bands.items() if one.high > 0]
    return max(sum(wanted.values()), *within, 0)


def are_contradictory(bands: Mapping[str, ShareBand], roles: Sequence[Role]) -> bool:
    """Return whether the bands contradict each other for every total."""
    low = math.fsum(bands.get(role.name, OPEN).low for role in roles)
    high = math.fsum(bands.get(role.name, OPEN).high for role in roles)
    return low > 1 + EXACT or high < 1 - EXACT


def band_bounds(role: Role, band: ShareBand, total: int, *, whole: bool) -> Bounds:
    """Return the lowest and highest count of replicas inside both the band and the role's own bounds. `whole`: the
    outermost whole numbers of the band, if it contains any. If both exclude each other, return the role's own bound
    next to the band."""
    low, high = band.low * total, band.high * total
    if whole and (first := math.ceil(low - EXACT)) <= (last := math.floor(high + EXACT)):
        low, high = first, last
    if high < role.min:
        return role.min, role.min
    if low > role.max:
        return role.max, role.max
    return max(low, role.min), min(high, role.max)


def are_hindered(bands: Mapping[str, ShareBand], roles: Sequence[Role], total: int) -> bool:
    """Return whether the roles' own bounds prevent a distribution of the total within the bands, with fractional
    replicas."""
    found = [band_bounds(role, bands.get(role.name, OPEN), total, whole=False) for role in roles]
    return (
        any(
            not role.min <= band.high * total + EXACT or not role.max >= band.low * total - EXACT
            for role in roles
            if (band := bands.get(role.name))
        )
        or math.fsum(low for low, _ in found) > total + EXACT
        or math.fsum(high for _, high in found) < total - EXACT
    )


def _band(written: Any) -> ShareBand | None:
    if not isinstance(written, Mapping):
        return None
    low, high = number(written.get("min")), number(written.get("max"))
    if low is None or high is None or low > high or high < 0 or low > 100:
        return None
    return ShareBand(max(low, 0.0) / 100, min(high, 100.0) / 100)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Shares and pressures in the order of the roles; None if the role has no readings."""

    of_roles: list[float | None]
    shares: list[float]
    reasons: set[Cause]


def pressures(roles: Sequence[Role], coordination: Coordination, metrics: Any, baseline: Sequence[float]) -> Pressure:
    """Return the pressure of each role. A role without readings keeps its part of `baseline`; the others divide the
    rest. So do all roles without pressure. `metrics` are {role: {signal: value}}, a value per ready replica."""
    if coordination.normalization == "relative":
        found = _relative(roles, coordination, metrics)
    else:
        found = [role_pressure(role.name, of_role(metrics, role.name), coordination) for role in roles]
    known = [value for value in found if value is not None]
    if not known:
        return Pressure(found, list(baseline), {Cause.UNAVAILABLE})
    reasons = {Cause.PARTIAL} if len(known) < len(found) else set()
    if max(known) <= coordination.pressure_floor:
        return Pressure(found, list(baseline), reasons | {Cause.IDLE})
    return Pressure(found, _shares(roles, coordination, found, baseline), reasons)


def role_pressure(role: str, readings: Mapping[Any, Any], coordination: Coordination) -> float | None:
    """Return the signals of one role, each relative to its saturation, as one number in [0, 1]."""
    terms = [
        (weight, min(value / saturation, 1.0))
        for name, weight, saturation in coordination.looked_at(role)
        if (value := reading(readings.get(name))) is not None
    ]
    if not terms:
        return None
    if coordination.combine == "max":
        return max(value for _, value in terms)
    largest = max(weight for weight, _ in terms)
    return sum(weight / largest * value for weight, value in terms) / sum(weight / largest for weight, _ in terms)


def _relative(roles: Sequence[Role], coordination: Coordination, metrics: Any) -> list[float | None]:
    """Return the sum of the signals, each as a part of its sum over the roles. A signal that one role misses while it
    reports others does not count: it would give the whole part to the other roles."""
    reported = [_reported(role.name, coordination, metrics) for role in roles]
    reporting = [signals for signals in reported if signals]
    common = [name for name in reporting[0] if all(name in signals for signals in reporting)] if reporting else []
    if not common:
        return [None] * len(roles)
    sums = [math.fsum(_part(name, signals, reporting) for name in common) for signals in reporting]
    whole = math.fsum(sums)
    parts = iter(value / whole if whole else 0.0 for value in sums)
    return [next(parts) if signals else None for signals in reported]


def _reported(role: str, coordination: Coordination, metrics: Any) -> dict[str, float]:
    readings = of_role(metrics, role)
    names = (*SATURATION, *coordination.signals.get(role, {}))
    return {name: value for name in names if (value := reading(readings.get(name))) is not None}


def _part(name: str, signals: Mapping[str, float], reporting: Sequence[Mapping[str, float]]) -> float:
    highest = max(other[name] for other in reporting)
    if not highest:
        return 0.0
    return (signals[name] / highest) / math.fsum(other[name] / highest for other in reporting)


def _shares(
    roles: Sequence[Role], coordination: Coordination, found: Sequence[float | None], baseline: Sequence[float]
) -> list[float]:
    weights = [
        None if value is None else max(value, coordination.pressure_floor) * _replicas(role, coordination)
        for role, value in zip(roles, found, strict=True)
    ]
    whole = math.fsum(weight for weight in weights if weight is not None)
    rest = 1.0 - math.fsum(share for share, weight in zip(baseline, weights, strict=True) if weight is None)
    return [
        share if weight is None else max(rest, 0.0) * weight / whole
        for share, weight in zip(baseline, weights, strict=True)
    ]


def _replicas(role: Role, coordination: Coordination) -> int:
    if coordination.weight_by == "none":
        return 1
    return max(role.current or 0 if role.ready is None else role.ready, 1)


_HALVINGS = 110
"""Halvings that find a factor of up to 1e15 to the last bit."""

NOTHING = 1e-9
"""Part of the sum below which a share counts as 0."""

EXACT = 1e-7
"""Largest floating-point error for which a replica count is still a whole number."""


def project(quotas: Sequence[float], low: Sequence[float], high: Sequence[float], total: float) -> list[float]:
    """Return x_i = clip(k * quota_i, low_i, high_i) with the one factor k for which they sum to `total`, so that values
    between their bounds keep their proportions. Needs sum(low) <= total <= sum(high). Quotas of 0 stay low until all
    others are high, and then share the rest by the distance to their bounds."""
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
        _share_by_capacity(found, others, high, rest - most)
    else:
        parts = [(quotas[at], low[at], high[at]) for at in scaled]
        for index, value in zip(scaled, _scaled(parts, rest), strict=True):
            found[index] = value
    return found


def round_bounded(values: Sequence[float], total: int, names: Sequence[str]) -> list[int]:
    """Return whole numbers with the sum `total` of `values`, each value rounded down or up: up for the largest
    remainders, and for equal ones by name. Whole-number bounds are kept."""
    near = [float(round(value)) if abs(value - round(value)) <= EXACT else value for value in values]
    floors = [math.floor(value) for value in near]
    by_remainder = sorted(range(len(near)), key=lambda at: (-round(near[at] - floors[at], 7), names[at]))
    for index in by_remainder[: max(total - sum(floors), 0)]:
        floors[index] += 1
    return floors


def _share_by_capacity(found: list[float], others: Sequence[int], high: Sequence[float], rest: float) -> None:
    capacity = math.fsum(high[index] - found[index] for index in others)
    for index in others if capacity > 0 else ():
        found[index] += (high[index] - found[index]) * min(max(rest / capacity, 0.0), 1.0)


def _scaled(parts: Sequence[tuple[float, float, float]], total: float) -> list[float]:
    """Return the part for each (quota, low, high)."""
    less, more = 0.0, max(high / quota for quota, _, high in parts)
    for _ in range(_HALVINGS):
        factor = (less + more) / 2
        found = [min(max(factor * quota, low), high) for quota, low, high in parts]
        if math.fsum(found) < total:
            less = factor
        else:
            more = factor
    return found


def cost_baseline(roles: Sequence[Role], total: int, expansion: float = EXPANSION) -> dict[str, int]:
    """Return the baseline by cost. The capacity of each role above its minimum is cut into packages of 1, r, r², …
    replicas, r = expansion / 100. The total is filled up with packages, the cheapest first; of two at one price, the
    package of the role named first."""
    replicas = {role.name: role.min for role in roles}
    left = total - sum(replicas.values())
    for _, index, length in sorted(_packages(roles, expansion)):
        if left <= 0:
            break
        taken = min(left, length)
        replicas[roles[index].name] += taken
        left -= taken
    return replicas


def _packages(roles: Sequence[Role], expansion: float) -> Iterator[tuple[float, int, int]]:
    """Return (price, index of the role, replicas). Without growth all packages of a role are alike, so they are joined
    to one."""
    for index, role in enumerate(roles):
        capacity, length = role.max - role.min, 1.0
        if expansion <= 100 and capacity > 0:
            yield role.cost, index, capacity
            continue
        while capacity > 0:
            size = min(capacity, int(length))
            yield role.cost * size, index, size
            capacity -= size
            length *= expansion / 100
