"""The cost baseline: which replicas come first where nothing but their price counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proxy.autoscale.policy import Role

EXPANSION = 200.0
"""Percent by which the packages of one role grow."""


def cost_baseline(roles: Sequence[Role], total: int, expansion: float = EXPANSION) -> dict[str, int]:
    """The capacity of each role above its minimum is cut into packages of 1, r, r², … replicas, r = expansion / 100.
    The total is filled up with them, the cheapest package first, of two at one price that of the role named first."""
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
    """(price, index of the role, replicas). Without growth all packages of a role are alike, so they are one."""
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
