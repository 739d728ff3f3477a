"""Drains of pods that are to be removed, and the sizes that were ordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from proxy.autoscale.settings import DrainSettings
from proxy.core.ports import Clock

if TYPE_CHECKING:
    from proxy.autoscale.scaled_pool import ScaledPool

SETTLES = 1.0
"""Seconds until all proxies know that a pod drains; until then one may send it a request."""


@dataclass(slots=True)
class Drains:
    """`doomed` are victims whose end was ordered: they are not let back in while that may still come."""

    settings: DrainSettings
    pods: ScaledPool
    clock: Clock
    _since: dict[str, dict[str, float]] = field(default_factory=dict)
    """By role and pod."""
    _doomed: dict[str, set[str]] = field(default_factory=dict)

    def start(self, role: str, count: int) -> list[str]:
        """The pods that go if `count` are to stay: they drain from here on, and no other that did so before."""
        order = drain_order(self.pods.replicas(role), role, self.settings.policy)
        going = order[: max(len(order) - count, 0)]
        victims = [one.name for one in going]
        known = self._since.setdefault(role, {})
        self._release(role, [name for name in known if name not in victims])
        for one in going:
            if one.name not in known or not one.draining:  # it may be a new pod of an old name
                known[one.name] = self.clock.now()
                self.pods.drain(one.name)
        return victims

    def names(self, role: str) -> list[str]:
        """Return the names of draining replicas."""
        return list(self._since.get(role, {}))

    def empty(self, role: str) -> bool:
        """Whether all that drain have ended their last request, or had all the time for it that they get."""
        now, known = self.clock.now(), self._since.get(role, {})
        replicas = {one.name: one for one in self.pods.replicas(role)}
        return all(
            name not in replicas or self._is_empty(replicas[name], now - since, role) for name, since in known.items()
        )

    def doom(self, role: str) -> None:
        """Their end is ordered."""
        self._doomed[role] = set(self._since.get(role, {}))

    def spare(self, role: str) -> None:
        """Whatever was ordered is over."""
        self._doomed.pop(role, None)

    def cancel(self, role: str) -> list[str]:
        """Return draining replicas to service, and return their names."""
        return self._release(role, list(self._since.get(role, {})))

    def described(self, role: str) -> list[dict[str, Any]]:
        """In JSON; `since` is seconds since the Unix epoch."""
        now, wall = self.clock.now(), self.clock.wall()
        replicas = {one.name: one for one in self.pods.replicas(role)}
        return [
            {
                "name": name,
                "url": replicas[name].url,
                "inflight": replicas[name].inflight,
                "cached_blocks": replicas[name].cached_blocks,
                "state": "drain_ready" if self._is_empty(replicas[name], now - since, role) else "draining",
                "since": wall - (now - since),
            }
            for name, since in self._since.get(role, {}).items()
            if name in replicas
        ]

    def forget_gone(self, role: str) -> None:
        there = {one.name for one in self.pods.replicas(role)}
        for name in [name for name in self._since.get(role, {}) if name not in there]:
            del self._since[role][name]

    def _is_empty(self, replica: Replica, seconds: float, role: str) -> bool:
        if not replica.ready and not replica.draining:
            return True
        return (seconds >= SETTLES and replica.inflight <= 0) or seconds >= self.settings.patience(role)

    def _release(self, role: str, names: Sequence[str]) -> list[str]:
        back = [name for name in names if name not in self._doomed.get(role, ())]
        for name in back:
            del self._since[role][name]
            self.pods.undrain(name)
        return back


Order = Literal["least-loss", "highest-ordinal", "newest"]


@dataclass(frozen=True, slots=True)
class Replica:
    """`cached_blocks` are counted by the prefix index, `ordinal` is the platform's number of it, `started` are seconds,
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

    least-loss: draining replicas, replicas that are not ready, replicas that are not the last of the role in their
    group; then the least in flight, the least in the cache, the youngest. highest-ordinal is the order of platforms
    that do not choose."""
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


@dataclass(slots=True)
class Orders:
    """Of one pool. An order is over when the role has the size, or after `startup` seconds: then what is there counts
    again, and it may be ordered again."""

    clock: Clock
    startup: float = 600.0
    _open: dict[str, tuple[int, float]] = field(default_factory=dict)

    def put(self, role: str, count: int) -> None:
        self._open[role] = (count, self.clock.now() + self.startup)

    def is_open(self, role: str, there: int) -> bool:
        """`there` are the replicas that can be seen."""
        if role not in self._open:
            return False
        count, until = self._open[role]
        if there == count or self.clock.now() >= until:
            del self._open[role]
            return False
        return True

    def current(self, role: str, there: int) -> int:
        """The replicas that are asked for."""
        return self._open[role][0] if self.is_open(role, there) else there
