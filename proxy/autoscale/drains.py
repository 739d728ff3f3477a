"""Drains of pods that are to be removed, and open orders."""

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
    """Draining replicas. `doomed` are victims whose removal was ordered: they do not return to service while that order
    may still be executed."""

    settings: DrainSettings
    pods: ScaledPool
    clock: Clock
    _since: dict[str, dict[str, float]] = field(default_factory=dict)
    """Start of the drain by role and pod."""
    _doomed: dict[str, set[str]] = field(default_factory=dict)

    def start(self, role: str, count: int) -> list[str]:
        """Drain the pods that are removed if `count` remain, and return their names. Other pods that this process
        drained return to service."""
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
        """Return whether all draining replicas have ended their last request or exceeded the time limit."""
        now, known = self.clock.now(), self._since.get(role, {})
        replicas = {one.name: one for one in self.pods.replicas(role)}
        return all(
            name not in replicas or self._is_empty(replicas[name], now - since, role) for name, since in known.items()
        )

    def doom(self, role: str) -> None:
        """Note that the removal of these replicas was ordered."""
        self._doomed[role] = set(self._since.get(role, {}))

    def spare(self, role: str) -> None:
        """Note that earlier removal orders are over."""
        self._doomed.pop(role, None)

    def cancel(self, role: str) -> list[str]:
        """Return draining replicas to service; return their names."""
        return self._release(role, list(self._since.get(role, {})))

    def described(self, role: str) -> list[dict[str, Any]]:
        """Return the drains ready for JSON; `since` is seconds since the Unix epoch."""
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

    def _is_empty(self, replica: DrainingReplica, seconds: float, role: str) -> bool:
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
class DrainingReplica:
    """One replica. `cached_blocks` are counted by the prefix index, `ordinal` is the platform's number, `started` is
    in seconds, `group` is the value of `drain.groupLabel`: the set of roles that the replica serves with; None
    without it."""

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


def drain_order(replicas: Sequence[DrainingReplica], role: str, order: Order) -> list[DrainingReplica]:
    """Return all replicas of the role in the order of removal. least-loss: draining replicas, replicas that are not
    ready, replicas that are not the last of the role in their group; then the fewest requests in flight, the fewest
    cached blocks, the youngest. highest-ordinal is the order of platforms that do not choose."""
    left = [one for one in replicas if one.role == role]
    if order == "highest-ordinal":
        return sorted(left, key=lambda one: -1 if one.ordinal is None else one.ordinal, reverse=True)
    key = _newest if order == "newest" else _least_loss
    ordered: list[DrainingReplica] = []
    while left:
        members = Counter(one.group for one in left)
        first = min(left, key=key(members))
        left.remove(first)
        ordered.append(first)
    return ordered


Key = Callable[[DrainingReplica], Any]


def _newest(members: Counter[str | None]) -> Key:
    return lambda one: (not one.draining, one.ready, -one.started, one.name)


def _least_loss(members: Counter[str | None]) -> Key:
    """Return the sort key. `members`: the number of remaining replicas of the role by group."""
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
    """The open orders of one pool. An order is over when the role has the size, or after `startup` seconds: then the
    observed size counts again, and the order may be repeated."""

    clock: Clock
    startup: float = 600.0
    _open: dict[str, tuple[int, float]] = field(default_factory=dict)

    def put(self, role: str, count: int) -> None:
        self._open[role] = (count, self.clock.now() + self.startup)

    def is_open(self, role: str, there: int) -> bool:
        """Return whether the order is open. `there` is the number of observed replicas."""
        if role not in self._open:
            return False
        count, until = self._open[role]
        if there == count or self.clock.now() >= until:
            del self._open[role]
            return False
        return True

    def current(self, role: str, there: int) -> int:
        """Return the number of ordered replicas."""
        return self._open[role][0] if self.is_open(role, there) else there
