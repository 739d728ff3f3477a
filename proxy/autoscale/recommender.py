"""The recommender of one pool: total, damping, distribution, gate and budget, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from proxy.autoscale.behavior import Damping
from proxy.autoscale.demand import DemandForecast, SizedRole, demands, total_of_all
from proxy.autoscale.distribution import bounded, distribute, least_total, read_bands, within
from proxy.autoscale.policy import Coordination, Result, Role, RoleSituation
from proxy.autoscale.settings import ScalingPolicy


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
        self._pool = pool
        self._damping = Damping(pool.behavior)
        self._outlook = DemandForecast()
        self._seen: float | None = None
        self._moved: float | None = None

    @property
    def pool(self) -> ScalingPolicy:
        """The policy. When it changes, the past is kept."""
        return self._pool

    @pool.setter
    def pool(self, pool: ScalingPolicy) -> None:
        self._pool = pool
        self._damping.behavior = pool.behavior

    def recommend(self, now: float, situations: Mapping[str, RoleSituation]) -> Recommendation | None:
        """Return a recommendation. `situations` has every role of the pool. Return None if no role has enough data to
        be sized."""
        if any(one.is_moving for one in situations.values()):
            self._moved = now
        fleet = [_sized(role.sized(None, None), situations[role.name]) for role in self._pool.roles]
        demand = self._demand([self._ahead(now, one) for one in fleet])
        if demand is None:
            return None
        raw, roles = demand
        current = sum(one.current for one in fleet)
        self._resume(now, current)
        wanted, panic = self._damping.correct(now, current, raw)
        if self._pool.surge and any(one.is_starting for one in situations.values()):
            wanted = max(wanted, current)
        recommendation = self._divided(now, roles, situations, (current, raw, wanted), panic)
        self._damping.applied(now, recommendation.total)
        return recommendation

    def _demand(self, fleet: Sequence[SizedRole]) -> tuple[int, list[Role]] | None:
        """Return the total that metrics and preferred ratios require, and the roles with their parts; where parts are
        unknown, they are the current replicas."""
        pool, tolerance = self._pool, self._pool.tolerance_percent / 100
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
        return least_total(bands, {role.name: count for role, count in zip(roles, found, strict=True)}), roles

    def _ahead(self, now: float, one: SizedRole) -> SizedRole:
        pool = self._pool
        own = next(role.metrics for role in pool.roles if role.name == one.role.name)
        return self._outlook.ahead(now, one, pool.metrics if pool.total == "joint" else own, pool.look_ahead)

    def _resume(self, now: float, current: int) -> None:
        behavior = self._pool.behavior
        longest = max(behavior.scale_down.stabilization, behavior.scale_up.stabilization)
        if self._seen is None or now - self._seen > max(longest, _SHORTEST_GAP):
            self._damping.start(now, current)
        self._seen = now

    def _divided(
        self,
        now: float,
        roles: Sequence[Role],
        situations: Mapping[str, RoleSituation],
        totals: tuple[int, int, int],
        panic: bool,
    ) -> Recommendation:
        pool, (current, raw, wanted) = self._pool, totals
        signals = {name: one.signals for name, one in situations.items()}
        gated = pool.gate and not panic and self._moved is not None and now - self._moved <= pool.settle

        def divide(total: int) -> tuple[Result, dict[str, int]]:
            result = distribute(roles, pool.coordination, total, signals, panic, pool.cost_expansion_rate_percent)
            live = bounded(roles, pool.coordination, total)
            if result.applied == "off":
                return result, filled(live, pool.coordination, result, result.total) if gated else dict(result.replicas)
            if panic and pool.coordination.panic_hold:
                calm = distribute(roles, pool.coordination, total, signals, False, pool.cost_expansion_rate_percent)
                return result, filled(live, pool.coordination, calm, calm.total)
            return result, _placed(pool, live, result, gated)

        corrected = within(roles, wanted)
        total, (result, replicas) = _affordable(pool, corrected, sum(role.min for role in roles), divide)
        return Recommendation(current, raw, corrected, replicas, result, panic, gated, total < corrected)


_SHORTEST_GAP = 60.0
"""Shortest gap in seconds between observations after which the past of a pool is void, however short its windows
are."""


def _placed(pool: ScalingPolicy, roles: Sequence[Role], result: Result, gated: bool) -> dict[str, int]:
    """Return the replicas by role. Where the demand of each role is unknown, replicas move all the way to the target,
    so that moves are rare."""
    chosen, is_sum = pool.coordination, pool.total == "sum"
    if not result.target:
        return dict(result.replicas)
    kept = filled(roles, chosen, result, result.total)
    if may_stay(roles, chosen, result, kept, is_sum=is_sum, gated=gated):
        return kept
    enough = partial(suffices, roles, chosen, result, gated=gated) if is_sum else None
    moved = stepped(kept, result.replicas, pool.max_moves, enough)
    both = {name: max(count, kept[name]) for name, count in moved.items()}
    return both if pool.surge and pool.affords(both) else moved


Divide = Callable[[int], tuple[Result, dict[str, int]]]


def _affordable(
    pool: ScalingPolicy, total: int, least: int, divide: Divide
) -> tuple[int, tuple[Result, dict[str, int]]]:
    """Return the largest total up to this one within the budget, or the smallest possible one. Every total is tried,
    because with three roles one more replica may take one away from a role."""
    if pool.gpu_budget is not None and (fewest := min(role.gpus for role in pool.roles)) > 0:
        total = max(min(total, int(pool.gpu_budget / fewest)), least)
    divided = divide(total)
    while pool.gpu_budget is not None and total > least and pool.gpus(divided[1]) > pool.gpu_budget:
        total -= 1
        divided = divide(total)
    return total, divided


def _sized(role: Role, situation: RoleSituation) -> SizedRole:
    return SizedRole(replace(role, current=situation.current, ready=situation.ready), situation.metrics)


PRESSED = 0.6
"""Pressure from which a role needs replicas, whatever its metrics require."""

Sizes = Mapping[str, int]


def filled(roles: Sequence[Role], coordination: Coordination, result: Result, total: int) -> dict[str, int]:
    """Return the result for this total without moves between roles: replicas are added where most are missing, and
    removed where the surplus is largest. No role loses replicas that it requires while another has a surplus. Where
    roles are divided by their demand, roles below their demand grow first: otherwise one would shrink again for another
    role's demand."""
    target = result.target or result.replicas
    held = {role.name: min(max(role.current or 0, role.min), role.max) for role in roles}
    missing = total - sum(held.values())
    by_demand = coordination.baseline == "demand" or missing < 0
    demand = {role.name: role.demand if by_demand and role.demand is not None else role.current or 0 for role in roles}
    for _ in range(abs(missing)):
        if missing > 0:
            open_roles = [role.name for role in roles if held[role.name] < role.max]
            held[max(open_roles, key=lambda name: (demand[name] > held[name], target[name] - held[name]))] += 1
        else:
            open_roles = [role.name for role in roles if held[role.name] > role.min]
            held[min(open_roles, key=lambda name: (demand[name] >= held[name], target[name] - held[name]))] -= 1
    return held


def may_stay(
    roles: Sequence[Role], coordination: Coordination, result: Result, kept: Sizes, *, is_sum: bool, gated: bool
) -> bool:
    """Return whether `kept` is as good as the result. `is_sum`: each role has its own demand; otherwise only the
    distance from the target counts."""
    if suffices(roles, coordination, result, kept, gated=gated) if is_sum else gated:
        return True
    return _keeps_bands(roles, coordination, result, kept) and _is_near(coordination, result, kept)


def suffices(roles: Sequence[Role], coordination: Coordination, result: Result, sizes: Sizes, *, gated: bool) -> bool:
    """Return whether each role has its demand, none is under pressure, and ratios are kept. Behind the gate only the
    demand counts: starting replicas are included, and pressure may end when they serve."""
    if any(role.demand is not None and role.demand > sizes[role.name] for role in roles):
        return False
    return gated or (_keeps_bands(roles, coordination, result, sizes) and not _is_pressed(result, sizes))


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


def _keeps_bands(roles: Sequence[Role], coordination: Coordination, result: Result, sizes: Sizes) -> bool:
    """Return whether the bands are kept as far as the result keeps them."""
    bands, _ = read_bands(coordination.preferred_ratio, roles)
    return not result.band_satisfied or all(one.holds(sizes[name], result.total) for name, one in bands.items())


def _is_pressed(result: Result, kept: Sizes) -> bool:
    return any((result.pressure.get(name) or 0) >= PRESSED and result.replicas[name] > kept[name] for name in kept)


def _is_near(coordination: Coordination, result: Result, kept: Sizes) -> bool:
    slack = 0.5 + coordination.hysteresis_percent / 100 * result.total
    return all(abs(result.target[name] - count) <= slack for name, count in kept.items())
