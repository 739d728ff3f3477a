"""Which replicas of a role go first when it shrinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Order = Literal["least-loss", "highest-ordinal", "newest"]


@dataclass(frozen=True, slots=True)
class Replica:
    """`cached_blocks` are those of the prefix index, `ordinal` is the platform's number of it, `started` are seconds,
    `group` is the value of `drain.groupLabel`: the set of roles that the replica serves with; None without it."""

    name: str
    role: str
    ready: bool = True
    draining: bool = False
    inflight: int = 0
    cached_blocks: int = 0
    ordinal: int | None = None
    started: float = 0.0
    url: str = ""
    group: str | None = None


def drain_order(replicas: Sequence[Replica], role: str, order: Order) -> list[Replica]:
    """All replicas of the role, the one to go first in front.

    least-loss: those that drain already, those that are not ready, and of the others not the last of the role in its
    group, then those with the least in flight, the least in their caches, the youngest. highest-ordinal is what a
    platform does that asks nobody."""
    left = [one for one in replicas if one.role == role]
    if order == "highest-ordinal":
        return sorted(left, key=lambda one: -1 if one.ordinal is None else one.ordinal, reverse=True)
    key = _newest if order == "newest" else _least_loss
    ordered: list[Replica] = []
    while left:
        members = Counter(one.group for one in left)
        first = min(left, key=key(members))
        left.remove(first)
        ordered.append(first)
    return ordered


Key = Callable[[Replica], Any]


def _newest(members: Counter[str | None]) -> Key:
    return lambda one: (not one.draining, one.ready, -one.started, one.name)


def _least_loss(members: Counter[str | None]) -> Key:
    """`members`: of each group, how many of the role are left."""
    return lambda one: (
        not one.draining,
        one.ready,
        one.group is not None and members[one.group] == 1,
        one.inflight,
        one.cached_blocks,
        -one.started,
        one.name,
    )
