"""One recommendation after the other for one pool: total, damping, division, gate and budget, without any I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from proxy.autoscale import bands as band
from proxy.autoscale.behavior import Damping
from proxy.autoscale.observed import Situation
from proxy.autoscale.outlook import Outlook
from proxy.autoscale.placement import filled, may_stay, stepped, suffices
from proxy.autoscale.policy import Result, Role
from proxy.autoscale.recommend import bounded, distribute, within
from proxy.autoscale.settings import PoolSettings
from proxy.autoscale.total import Sized, demands, total_of_all


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
        asked = self._asked([self._ahead(now, one) for one in fleet])
        if asked is None:
            return None
        raw, roles = asked
        current = sum(one.current for one in fleet)
        self._take_up(now, current)
        wanted, panic = self._damping.correct(now, current, raw)
        if self._pool.surge and any(one.is_starting for one in situations.values()):
            wanted = max(wanted, current)
        recommendation = self._divided(now, roles, situations, (current, raw, wanted), panic)
        self._damping.applied(now, recommendation.total)
        return recommendation

    def _asked(self, fleet: Sequence[Sized]) -> tuple[int, list[Role]] | None:
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
        told = pool.coordination
        bands, _ = band.read(told.preferred_ratio if told.mode == "preferred" else {}, roles)
        return band.least_total(bands, {role.name: count for role, count in zip(roles, found, strict=True)}), roles

    def _ahead(self, now: float, one: Sized) -> Sized:
        pool = self._pool
        own = next(role.metrics for role in pool.roles if role.name == one.role.name)
        return self._outlook.ahead(now, one, pool.metrics if pool.total == "joint" else own, pool.look_ahead)

    def _take_up(self, now: float, current: int) -> None:
        behavior = self._pool.behavior
        longest = max(behavior.scale_down.stabilization, behavior.scale_up.stabilization)
        if self._seen is None or now - self._seen > max(longest, _SHORTEST_GAP):
            self._damping.begin(now, current)
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
    """Where nobody knows what each role asks for a move goes all the way, so that the next is far off."""
    told, told_apart = pool.coordination, pool.total == "sum"
    if not result.target:
        return dict(result.replicas)
    kept = filled(roles, told, result, result.total)
    if may_stay(roles, told, result, kept, told_apart=told_apart, gated=gated):
        return kept
    enough = partial(suffices, roles, told, result, gated=gated) if told_apart else None
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
