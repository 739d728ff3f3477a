"""Where the replicas of a total go, coming from where they are: none moves to another role without need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.autoscale import bands as band
from proxy.autoscale.policy import Coordination, Result, Role

PRESSED = 0.6
"""Pressure from which on a role is short of replicas, whatever its metrics ask for."""

Sizes = Mapping[str, int]


def filled(roles: Sequence[Role], result: Result, total: int) -> dict[str, int]:
    """So many replicas, and no role gives one to another: what is added goes where most is missing of the result, what
    is taken away comes from where there is most too much."""
    target = result.target or result.replicas
    held = {role.name: min(max(role.current or 0, role.min), role.max) for role in roles}
    missing = total - sum(held.values())
    for _ in range(abs(missing)):
        if missing > 0:
            open_roles = [role.name for role in roles if held[role.name] < role.max]
            held[max(open_roles, key=lambda name: target[name] - held[name])] += 1
        else:
            open_roles = [role.name for role in roles if held[role.name] > role.min]
            held[min(open_roles, key=lambda name: target[name] - held[name])] -= 1
    return held


def may_stay(
    roles: Sequence[Role], coordination: Coordination, result: Result, kept: Sizes, *, told_apart: bool, gated: bool
) -> bool:
    """Whether `kept` does as well as the result. `told_apart`: the demand of each role is its own; else only the
    distance from the target counts. Behind the gate only a role that asks for more than it would have is a need: those
    that start for it are counted, and its pressure may end when they serve."""
    asking = told_apart and any(role.demand is not None and role.demand > kept[role.name] for role in roles)
    if gated and not asking:
        return True
    if result.band_satisfied and not _within_bands(roles, coordination, result, kept):
        return False
    return (told_apart and not asking and not _is_pressed(result, kept)) or _is_near(coordination, result, kept)


def stepped(kept: Sizes, wanted: Sizes, most: int) -> dict[str, int]:
    """From one to the other by at most `most` replicas that change their role, those first that are missed most; 0 is
    any number."""
    held = dict(kept)
    for _ in range(most):
        lacking = max(held, key=lambda name: wanted[name] - held[name])
        giving = min(held, key=lambda name: wanted[name] - held[name])
        if held[lacking] < wanted[lacking]:
            held[lacking] += 1
            held[giving] -= 1
    return held if most else dict(wanted)


def _within_bands(roles: Sequence[Role], coordination: Coordination, result: Result, kept: Sizes) -> bool:
    bands, _ = band.read(coordination.preferred_ratio, roles)
    return all(one.holds(kept[name], result.total) for name, one in bands.items())


def _is_pressed(result: Result, kept: Sizes) -> bool:
    return any((result.pressure.get(name) or 0) >= PRESSED and result.replicas[name] > kept[name] for name in kept)


def _is_near(coordination: Coordination, result: Result, kept: Sizes) -> bool:
    slack = 0.5 + coordination.hysteresis_percent / 100 * result.total
    return all(abs(result.target[name] - count) <= slack for name, count in kept.items())
