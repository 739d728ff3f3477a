"""The recommender of one pool: total, damping, distribution, gate and budget, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from proxy.autoscale.behavior import Damping
from proxy.autoscale.demand import Outlook, Sized, demands, total_of_all
from proxy.autoscale.distribution import bounded, distribute, least_total, read_bands, within
from proxy.autoscale.policy import Coordination, Result, Role, Situation
from proxy.autoscale.settings import PoolSettings


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Totals before and after damping, and how `total` is divided: `replicas`, which differ from `result` where none
    moves that need not. `over_budget`: the GPUs allow less than was corrected to."""

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
    """Knows the pool's past. `recommend` is called again and again with a clock that never goes back."""

    def __init__(self, pool: PoolSettings) -> None:
        self._pool = pool
        self._damping = Damping(pool.behavior)
        self._outlook = Outlook()
        self._seen: float | None = None
        self._moved: float | None = None

    @property
    def pool(self) -> PoolSettings:
        """The policy. Where it changes, the past stays."""
        return self._pool

    @pool.setter
    def pool(self, pool: PoolSettings) -> None:
        self._pool = pool
        self._damping.behavior = pool.behavior

    def recommend(self, now: float, situations: Mapping[str, Situation]) -> Recommendation | None:
        """`situations` has every role of the pool. None: of no role is anything known that it could be sized by."""
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

    def _demand(self, fleet: Sequence[Sized]) -> tuple[int, list[Role]] | None:
        """The total that metrics and preferred ratios ask for, and the roles with their parts of it; where these are
        not told apart it is what they have."""
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

    def _ahead(self, now: float, one: Sized) -> Sized:
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
        situations: Mapping[str, Situation],
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
"""Seconds for which a pool may be out of sight before its past is void, however short its windows are."""


def _placed(pool: PoolSettings, roles: Sequence[Role], result: Result, gated: bool) -> dict[str, int]:
    """Where the demand of each role is not known, replicas move all the way to the target, so that moves are rare."""
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
    pool: PoolSettings, total: int, least: int, divide: Divide
) -> tuple[int, tuple[Result, dict[str, int]]]:
    """The largest total up to this one whose replicas the budget allows, or the least there can be. Every total is
    tried, since with three roles one replica more may take one away from a role."""
    if pool.gpu_budget is not None and (fewest := min(role.gpus for role in pool.roles)) > 0:
        total = max(min(total, int(pool.gpu_budget / fewest)), least)
    divided = divide(total)
    while pool.gpu_budget is not None and total > least and pool.gpus(divided[1]) > pool.gpu_budget:
        total -= 1
        divided = divide(total)
    return total, divided


def _sized(role: Role, situation: Situation) -> Sized:
    return Sized(replace(role, current=situation.current, ready=situation.ready), situation.metrics)


PRESSED = 0.6
"""Pressure from which on a role is short of replicas, whatever its metrics ask for."""

Sizes = Mapping[str, int]


def filled(roles: Sequence[Role], coordination: Coordination, result: Result, total: int) -> dict[str, int]:
    """So many replicas, and no role gives one to another: what is added goes where most is missing of the result, what
    is taken away comes from where there is most too much. No role gives what it asks for while another has more than
    that; and where roles are divided by their demand those grow first that ask for more than they have: else one would
    shrink again for what another demand for."""
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
    """Return whether `kept` is as good as the result. `is_sum`: the demand of each role is its own; else only the
    distance from the target counts."""
    if suffices(roles, coordination, result, kept, gated=gated) if is_sum else gated:
        return True
    return _keeps_bands(roles, coordination, result, kept) and _is_near(coordination, result, kept)


def suffices(roles: Sequence[Role], coordination: Coordination, result: Result, sizes: Sizes, *, gated: bool) -> bool:
    """Whether each role has what it asks for, none is pressed, and ratios are kept. Behind the gate only the first is a
    need: starting replicas are counted, and pressure may end when they serve."""
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
    bands, _ = read_bands(coordination.preferred_ratio, roles)
    return not result.band_satisfied or all(one.holds(sizes[name], result.total) for name, one in bands.items())


def _is_pressed(result: Result, kept: Sizes) -> bool:
    return any((result.pressure.get(name) or 0) >= PRESSED and result.replicas[name] > kept[name] for name in kept)


def _is_near(coordination: Coordination, result: Result, kept: Sizes) -> bool:
    slack = 0.5 + coordination.hysteresis_percent / 100 * result.total
    return all(abs(result.target[name] - count) <= slack for name, count in kept.items())
