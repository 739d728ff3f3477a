"""How hard each role is pressed, and the share of the total it would have if that alone counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.autoscale.policy import SATURATION, Cause, Coordination, Role
from proxy.autoscale.readings import of_role, reading


@dataclass(frozen=True, slots=True)
class Pressure:
    """Both in the order of the roles; None: nothing is known of the role."""

    of_roles: list[float | None]
    shares: list[float]
    reasons: set[Cause]


def pressures(roles: Sequence[Role], coordination: Coordination, metrics: Any, baseline: Sequence[float]) -> Pressure:
    """A role of which nothing is known keeps its part of `baseline`; the others divide the rest. So do all where nobody
    is pressed. `metrics` are {role: {signal: value}}, a value per ready replica."""
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
    """The signals of one role, each as a part of its saturation, in one number in [0, 1]."""
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
    """Each signal as a part of its sum over the roles, the signals added up. A signal that one role does not report,
    while it reports others, would give all of it to the rest: so it does not count."""
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
