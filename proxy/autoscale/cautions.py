"""What is allowed in a policy, and hardly meant."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.autoscale import bands as band
from proxy.autoscale.behavior import Behavior
from proxy.autoscale.policy import TTFT
from proxy.autoscale.recommend import bounded
from proxy.autoscale.settings import PATH, AutoscaleSettings, PoolSettings
from proxy.core.errors import Problem
from proxy.core.params import join

_TOTALS = 5000
"""Totals that are tried before a band counts as out of reach."""


def cautions(settings: AutoscaleSettings, path: str = PATH) -> Iterator[Problem]:
    if not settings.pools:
        yield Problem(join(path, "pools"), "has none: nothing is recommended")
    for name, pool in settings.pools.items():
        here = join(join(path, "pools"), name)
        yield from _of_roles(pool, here)
        yield from _of_coordination(pool, join(here, "coordination"))
        yield from _of_acting(pool, here)
        yield from _of_behavior(pool.behavior, join(here, "behavior"))
        if pool.stale_after < settings.interval:
            yield Problem(
                join(here, "staleAfter"), "is shorter than the interval: values are missing that were just read"
            )


def _of_roles(pool: PoolSettings, path: str) -> Iterator[Problem]:
    for index, role in enumerate(pool.roles):
        if "." in role.name:
            yield Problem(f"{path}.roles[{index}].name", "has a dot, which a path into the answer takes for a level")
    most = sum(role.gpus * role.max for role in pool.roles)
    least = sum(role.gpus * role.min for role in pool.roles)
    budget = pool.gpu_budget
    if budget is not None and least > budget:
        yield Problem(join(path, "gpuBudget"), f"is less than what the minima take ({least:g}): the minima win")
    elif budget is not None and most > budget:
        yield Problem(join(path, "gpuBudget"), f"is less than what the maxima take ({most:g}): they are out of reach")


def _of_acting(pool: PoolSettings, path: str) -> Iterator[Problem]:
    if pool.mode == "active" and pool.actuator is None:
        yield Problem(join(path, "mode"), "active has no effect without an actuator: others read what is recommended")
    for index, role in enumerate(pool.roles):
        if any((one.source or one.name) == TTFT for one in role.metrics):
            here = f"{path}.roles[{index}].metrics"
            yield Problem(here, f"{TTFT} is not known without traffic, and then the role does not shrink")


def _of_coordination(pool: PoolSettings, path: str) -> Iterator[Problem]:
    told = pool.coordination
    if told.mode != "preferred":
        if told.preferred_ratio:
            yield Problem(join(path, "preferredRatio"), "has no effect with mode: off")
        if told.signals:
            yield Problem(join(path, "signals"), "has no effect with mode: off")
        return
    if len(pool.roles) == 1:
        yield Problem(path, "has no effect on one role")
        return
    for role in pool.roles:
        if not told.looked_at(role.name):
            yield Problem(path, f"role '{role.name}' has no signal that counts: its share is that of the baseline")
    if told.preferred_ratio and not _within_reach(pool):
        yield Problem(
            join(path, "preferredRatio"), "cannot be kept with any total: the roles' min and max are in the way"
        )


def _of_behavior(behavior: Behavior, path: str) -> Iterator[Problem]:
    down, up = behavior.scale_down, behavior.scale_up
    if down.select == "or" and down.percent >= 100:
        yield Problem(join(path, "scaleDown"), "limits nothing: 100 percent may go, or so many instances; select: and")
    if up.stabilization > 0 and behavior.panic.hold > 0:
        yield Problem(join(path, "scaleUp.stabilization"), "does not hold in panic")


def _within_reach(pool: PoolSettings) -> bool:
    roles = bounded([role.sized(None, None) for role in pool.roles], pool.coordination, 1)
    bands, _ = band.read(pool.coordination.preferred_ratio, roles)
    least, most = max(sum(role.min for role in roles), 1), sum(role.max for role in roles)
    return any(not band.hindered(bands, roles, total) for total in range(least, min(most, least + _TOTALS) + 1))
