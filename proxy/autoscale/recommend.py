"""Divides a total of replicas among roles. Pure: the same arguments give the same result, and none makes it fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from proxy.autoscale import bands as band
from proxy.autoscale.bands import OPEN, Band, Bounds
from proxy.autoscale.cost import EXPANSION, cost_baseline
from proxy.autoscale.policy import Cause, Coordination, Result, Role
from proxy.autoscale.pressure import pressures
from proxy.autoscale.projection import EXACT, project, round_bounded


def distribute(
    roles: Sequence[Role],
    coordination: Coordination,
    total: int,
    metrics: Any,
    panic: bool = False,
    expansion: float = EXPANSION,
) -> Result:
    """The replicas sum to the total, as far as the bounds of the roles allow it, and keep those bounds; preferred
    ratios are kept wherever whole numbers can keep them. Roles have names of their own and min <= max.

    `metrics` are {role: {signal: value}}, each per ready replica; what is absent or no reading is missing, and missing
    is not 0. `expansion`: see `cost.cost_baseline`."""
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
    """Coupled roles have at least a replica each as soon as one of them has."""
    if not coordination.coupled or within(roles, total) <= 0:
        return list(roles)
    return [dataclasses.replace(role, min=max(role.min, 1)) for role in roles]


def within(roles: Sequence[Role], total: int) -> int:
    return min(max(total, sum(role.min for role in roles)), sum(role.max for role in roles))


def _in_panic(
    roles: Sequence[Role], coordination: Coordination, total: int, base: dict[str, int], expansion: float
) -> dict[str, int]:
    """The division by cost alone could take from a role what it needs most now."""
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
    bands, ignored = band.read(coordination.preferred_ratio, roles)
    limits = _limits(roles, bands, total)
    target = _projected([share * total for share in blended], limits, roles, total)
    replicas, held = _settled(roles, coordination, target, limits, total)
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
    """That of the cost where what it should be made of is not known, or is nothing."""
    told = [_of_baseline(role, coordination) for role in roles]
    counts = [count for count in told if count is not None]
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


def _limits(roles: Sequence[Role], bands: dict[str, Band], total: int) -> list[Bounds]:
    """In whole numbers, unless the total does not fit between these."""
    for whole in (True, False):
        limits = [band.bounds(role, bands.get(role.name, OPEN), total, whole=whole) for role in roles]
        if _lowest(limits) <= total + EXACT and _highest(limits) >= total - EXACT:
            break
    return limits


def _projected(quotas: Sequence[float], limits: Sequence[Bounds], roles: Sequence[Role], total: int) -> list[float]:
    """Where the limits leave no room for the total, they give way in proportion, as far as the roles' own bounds."""
    low, high = [low for low, _ in limits], [high for _, high in limits]
    if _lowest(limits) > total:
        return project(low, [role.min for role in roles], low, total)
    if _highest(limits) < total:
        return project(high, high, [role.max for role in roles], total)
    return project(quotas, low, high, total)


def _settled(
    roles: Sequence[Role], coordination: Coordination, target: Sequence[float], limits: Sequence[Bounds], total: int
) -> tuple[dict[str, int], set[Cause]]:
    """The whole numbers next to the target, or what runs, if that is near enough."""
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


def _hindrance(roles: Sequence[Role], bands: dict[str, Band], total: int) -> Cause:
    if band.contradictory(bands, roles):
        return Cause.INFEASIBLE
    return Cause.CLAMPED if band.hindered(bands, roles, total) else Cause.ROUNDING


def _lowest(limits: Sequence[Bounds]) -> float:
    return math.fsum(low for low, _ in limits)


def _highest(limits: Sequence[Bounds]) -> float:
    return math.fsum(high for _, high in limits)
