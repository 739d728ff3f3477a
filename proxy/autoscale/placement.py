"""Where the replicas of a total go, coming from where they are: none moves to another role without need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from proxy.autoscale import bands as band
from proxy.autoscale.policy import Coordination, Result, Role

PRESSED = 0.6
"""Pressure from which on a role is short of replicas, whatever its metrics ask for."""

Sizes = Mapping[str, int]


def filled(roles: Sequence[Role], coordination: Coordination, result: Result, total: int) -> dict[str, int]:
    """So many replicas, and no role gives one to another: what is added goes where most is missing of the result, what
    is taken away comes from where there is most too much. No role gives what it asks for while another has more than
    that; and where roles are divided by their demand those grow first that ask for more than they have: else one would
    shrink again for what another asked for."""
    target = result.target or result.replicas
    held = {role.name: min(max(role.current or 0, role.min), role.max) for role in roles}
    missing = total - sum(held.values())
    by_demand = coordination.baseline == "demand" or missing < 0
    asked = {role.name: role.demand if by_demand and role.demand is not None else role.current or 0 for role in roles}
    for _ in range(abs(missing)):
        if missing > 0:
            open_roles = [role.name for role in roles if held[role.name] < role.max]
            held[max(open_roles, key=lambda name: (asked[name] > held[name], target[name] - held[name]))] += 1
        else:
            open_roles = [role.name for role in roles if held[role.name] > role.min]
            held[min(open_roles, key=lambda name: (asked[name] >= held[name], target[name] - held[name]))] -= 1
    return held


def may_stay(
    roles: Sequence[Role], coordination: Coordination, result: Result, kept: Sizes, *, told_apart: bool, gated: bool
) -> bool:
    """Whether `kept` does as well as the result. `told_apart`: the demand of each role is its own; else only the
    distance from the target counts."""
    if suffices(roles, coordination, result, kept, gated=gated) if told_apart else gated:
        return True
    return _keeps_bands(roles, coordination, result, kept) and _is_near(coordination, result, kept)


def suffices(roles: Sequence[Role], coordination: Coordination, result: Result, sizes: Sizes, *, gated: bool) -> bool:
    """Whether each role has what it asks for, none is pressed, and ratios are kept. Behind the gate only the first is a
    need: those that start are counted, and pressure may end when they serve."""
    if any(role.demand is not None and role.demand > sizes[role.name] for role in roles):
        return False
    return gated or (_keeps_bands(roles, coordination, result, sizes) and not _is_pressed(result, sizes))


def stepped(kept: Sizes, wanted: Sizes, most: int, enough: Callable[[Sizes], bool] | None) -> dict[str, int]:
    """From one towards the other, replica by replica, those first that are missed most: until it is enough, and by at
    most `most` replicas that change their role; 0 is any number."""
    held, moved = dict(kept), 0
    while held != wanted and (moved < most or not most) and not (enough and enough(held)):
        lacking = max(held, key=lambda name: wanted[name] - held[name])
        giving = min(held, key=lambda name: wanted[name] - held[name])
        held[lacking] += 1
        held[giving] -= 1
        moved += 1
    return held


def _keeps_bands(roles: Sequence[Role], coordination: Coordination, result: Result, sizes: Sizes) -> bool:
    """As far as the result does."""
    bands, _ = band.read(coordination.preferred_ratio, roles)
    return not result.band_satisfied or all(one.holds(sizes[name], result.total) for name, one in bands.items())


def _is_pressed(result: Result, kept: Sizes) -> bool:
    return any((result.pressure.get(name) or 0) >= PRESSED and result.replicas[name] > kept[name] for name in kept)


def _is_near(coordination: Coordination, result: Result, kept: Sizes) -> bool:
    slack = 0.5 + coordination.hysteresis_percent / 100 * result.total
    return all(abs(result.target[name] - count) <= slack for name, count in kept.items())
