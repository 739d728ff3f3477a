"""The recommender of one pool: total, damping, distribution, gate and budget, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.autoscale.behavior import Damping
from proxy.autoscale.demand import DemandForecast, SizedRole, demands, total_of_all
from proxy.autoscale.distribution import bounded, distribute, least_total, read_bands, within
from proxy.autoscale.policy import Result, Role, RoleSituation
from proxy.autoscale.settings import RoleSettings, ScalingPolicy


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation: totals before and after damping, and the distribution of `total`: `replicas`, which differ from
    `result` if moves are not necessary. `over_budget`: the GPU budget allows less than the damped total."""

    current: int
    raw: int
    corrected: int
    replicas: Mapping[str, int]
    result: Result
    panic: bool
    gated: bool
    over_budget: bool

    @property
    def total(self) -> int:
        return sum(self.replicas.values())


class Recommender:
    """The recommender of one pool, with its past. Call `recommend` repeatedly with a clock that never goes back."""

    def __init__(self, pool: ScalingPolicy) -> None:
        self.pool = pool
        """The policy. When it changes, the past is kept."""
        self._damping = Damping()
        self._outlook = DemandForecast()
        self._seen: float | None = None
        self._moved: float | None = None

    def recommend(self, now: float, situations: Mapping[str, RoleSituation]) -> Recommendation | None:
        """Return a recommendation. `situations` has every role of the pool. Return None if no role has enough data to
        be sized."""
        pool = self.pool
        if any(one.is_moving for one in situations.values()):
            self._moved = now
        fleet = [_sized(role, situations[role.name]) for role in pool.roles]
        current = sum(one.current for one in fleet)
        demand = self._demand(
            [
                self._outlook.ahead(now, one, pool.metrics_of(role), pool.look_ahead)
                for role, one in zip(pool.roles, fleet, strict=True)
            ]
        )
        if demand is None:
            return None
        raw, roles = demand
        self._resume(now, current)
        wanted, panic = self._damping.correct(pool.behavior, now, current, raw)
        if pool.surge and any(one.is_starting for one in situations.values()):
            wanted = max(wanted, current)
        corrected = within(roles, wanted)
        gated = pool.gate and not panic and self._moved is not None and now - self._moved <= pool.settle
        signals = {name: one.signals for name, one in situations.items()}
        total, (result, replicas) = _affordable(
            pool,
            corrected,
            sum(role.min for role in roles),
            lambda total: _divided(pool, roles, total, signals, panic, gated),
        )
        return Recommendation(current, raw, corrected, replicas, result, panic, gated, total < corrected)

    def _demand(self, fleet: Sequence[SizedRole]) -> tuple[int, list[Role]] | None:
        """Return the total that metrics and preferred ratios require, and the roles with their parts; where parts are
        unknown, they are the current replicas."""
        pool, tolerance = self.pool, self.pool.tolerance_percent / 100
        spare = pool.behavior.scale_down.spare
        if pool.total == "joint":
            total = total_of_all(fleet, pool.metrics, tolerance, spare)
            return None if total is None else (total, [replace(one.role, demand=one.current) for one in fleet])
        found = demands(fleet, {role.name: role.metrics for role in pool.roles}, tolerance, spare)
        if found is None:
            return None
        roles = [replace(one.role, demand=count) for one, count in zip(fleet, found, strict=True)]
        chosen = pool.coordination
        bands, _ = read_bands(chosen.preferred_ratio if chosen.mode == "preferred" else {}, roles)
        names = (role.name for role in roles)
        return least_total(bands, dict(zip(names, found, strict=True))), roles

    def _resume(self, now: float, current: int) -> None:
        behavior = self.pool.behavior
        longest = max(behavior.scale_down.stabilization, behavior.scale_up.stabilization)
        if self._seen is None or now - self._seen > max(longest, _SHORTEST_GAP):
            self._damping.start(now, current)
        self._seen = now


_SHORTEST_GAP = 60.0
"""Shortest gap in seconds between observations after which the past of a pool is void, however short its windows
are."""


def _affordable(
    pool: ScalingPolicy, total: int, least: int, divided: Callable[[int], tuple[Result, dict[str, int]]]
) -> tuple[int, tuple[Result, dict[str, int]]]:
    """Return the largest total up to this one within the budget, or the smallest possible one. Every total is tried,
    because with three roles one more replica may take one away from a role."""
    if pool.gpu_budget is not None and (fewest := min(role.gpus for role in pool.roles)) > 0:
        total = max(min(total, int(pool.gpu_budget / fewest)), least)
    found = divided(total)
    while total > least and not pool.affords(found[1]):
        total -= 1
        found = divided(total)
    return total, found


def _divided(
    pool: ScalingPolicy, roles: Sequence[Role], total: int, signals: Any, panic: bool, gated: bool
) -> tuple[Result, dict[str, int]]:
    coordination, expansion = pool.coordination, pool.cost_expansion_rate_percent
    result = distribute(roles, coordination, total, signals, panic, expansion)
    live = bounded(roles, coordination, total)
    if result.applied == "panic" and coordination.panic_hold:
        calm = distribute(roles, coordination, total, signals, False, expansion)
        return result, RoleSplit(pool, live, calm, gated).filled()
    return result, RoleSplit(pool, live, result, gated).replicas()


def _sized(role: RoleSettings, situation: RoleSituation) -> SizedRole:
    return SizedRole(role.sized(situation.current, situation.ready), situation.metrics)


PRESSED = 0.6
"""Pressure from which a role needs replicas, whatever its metrics require."""

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RoleSplit:
    """The replicas of the roles by a result, with few moves between roles. `gated`: replicas start or drain, so only
    demand justifies a move."""

    pool: ScalingPolicy
    roles: Sequence[Role]
    result: Result
    gated: bool

    def replicas(self) -> dict[str, int]:
        """Return the replicas by role. Where the demand of each role is unknown, replicas move all the way to the
        target, so that moves are rare."""
        if self.result.applied == "off" and self.gated:
            return self.filled()
        if not self.result.target:
            return dict(self.result.replicas)
        kept = self.filled()
        if self._may_stay(kept):
            return kept
        moved = stepped(kept, self.result.replicas, self.pool.max_moves, self._suffices if self._is_sum else None)
        both = {name: max(count, kept[name]) for name, count in moved.items()}
        return both if self.pool.surge and self.pool.affords(both) else moved

    def filled(self) -> dict[str, int]:
        """Return the result without moves between roles: replicas are added where most are missing, and removed where
        the surplus is largest. No role loses replicas that it requires while another has a surplus. Where roles are
        divided by their demand, roles below their demand grow first: otherwise one would shrink again for another
        role's demand."""
        roles, target = self.roles, self.result.target or self.result.replicas
        held = {role.name: min(max(role.current or 0, role.min), role.max) for role in roles}
        missing = self.result.total - sum(held.values())
        by_demand = self.pool.coordination.baseline == "demand" or missing < 0
        demand = {
            role.name: role.demand if by_demand and role.demand is not None else role.current or 0 for role in roles
        }
        for _ in range(abs(missing)):
            if missing > 0:
                open_roles = [role.name for role in roles if held[role.name] < role.max]
                held[max(open_roles, key=lambda name: (demand[name] > held[name], target[name] - held[name]))] += 1
            else:
                open_roles = [role.name for role in roles if held[role.name] > role.min]
                held[min(open_roles, key=lambda name: (demand[name] >= held[name], target[name] - held[name]))] -= 1
        return held

    @property
    def _is_sum(self) -> bool:
        """Whether each role has its own demand; otherwise only the distance from the target counts."""
        return self.pool.total == "sum"

    def _may_stay(self, kept: Sizes) -> bool:
        """Return whether `kept` is as good as the result."""
        if self._suffices(kept) if self._is_sum else self.gated:
            return True
        slack = 0.5 + self.pool.coordination.hysteresis_percent / 100 * self.result.total
        is_near = all(abs(self.result.target[name] - count) <= slack for name, count in kept.items())
        return is_near and self._keeps_bands(kept)

    def _suffices(self, sizes: Sizes) -> bool:
        """Return whether each role has its demand, none is under pressure, and ratios are kept. Behind the gate only
        the demand counts: starting replicas are included, and pressure may end when they serve."""
        if any(role.demand is not None and role.demand > sizes[role.name] for role in self.roles):
            return False
        pressure, replicas = self.result.pressure, self.result.replicas
        is_pressed = any((pressure.get(name) or 0) >= PRESSED and replicas[name] > sizes[name] for name in sizes)
        return self.gated or (self._keeps_bands(sizes) and not is_pressed)

    def _keeps_bands(self, sizes: Sizes) -> bool:
        """Return whether the bands are kept as far as the result keeps them."""
        bands, _ = read_bands(self.pool.coordination.preferred_ratio, self.roles)
        total = self.result.total
        return not self.result.band_satisfied or all(one.holds(sizes[name], total) for name, one in bands.items())


def stepped(kept: Sizes, wanted: Sizes, most: int, enough: Callable[[Sizes], bool] | None) -> dict[str, int]:
    """Move from one distribution towards the other, replica by replica, the most needed first, until it is sufficient,
    with at most `most` replicas that change their role; 0 is unlimited."""
    held, moved = dict(kept), 0
    while held != wanted and (moved < most or not most) and not (enough and enough(held)):
        lacking = max(held, key=lambda name: wanted[name] - held[name])
        giving = min(held, key=lambda name: wanted[name] - held[name])
        held[lacking] += 1
        held[giving] -= 1
        moved += 1
    return held
