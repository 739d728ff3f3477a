"""Drains of pods that are to be removed, and open orders."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.autoscale.settings import DrainPolicy, DrainSettings
from proxy.core.ports import Clock

if TYPE_CHECKING:
    from proxy.autoscale.scaled_pool import ScaledPool

SETTLES = 1.0
"""Seconds until all proxies know that a pod drains; until then one may send it a request."""


@dataclass(slots=True)
class Drains:
    """Draining replicas. Victims whose removal was ordered do not return to service while that order may still be
    executed."""

    settings: DrainSettings
    pods: ScaledPool
    clock: Clock
    _since: defaultdict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """Start of the drain by role and pod."""
    _ordered: dict[str, set[str]] = field(default_factory=dict)
    """Victims whose removal was ordered, by role."""

    def start(self, role: str, count: int) -> list[str]:
        """Drain the pods that are removed if `count` remain, and return their names. Other pods that this process
        drained return to service."""
        order = drain_order(self.pods.replicas(role), self.settings.policy)
        going = order[: max(len(order) - count, 0)]
        victims = [one.name for one in going]
        known = self._since[role]
        self._release(role, [name for name in known if name not in victims])
        for one in going:
            if one.name not in known or not one.is_victim:  # it may be a new pod of an old name
                known[one.name] = self.clock.now()
                self.pods.drain(one.name)
        return victims

    def inherit(self, roles: Iterable[str]) -> None:
        """Continue the drains of an earlier leader."""
        for role in roles:
            for one in self.pods.replicas(role):
                if one.is_victim:
                    self._since[role].setdefault(one.name, self.clock.now())

    def names(self, role: str) -> list[str]:
        return list(self._since[role])

    def empty(self, role: str) -> bool:
        """Return whether all draining replicas have ended their last request or exceeded the time limit."""
        return all(self._is_empty(one, since, role) for one, since in self._draining(role))

    def removal_ordered(self, role: str) -> None:
        """Note that the removal of these replicas was ordered."""
        self._ordered[role] = set(self._since[role])

    def removal_over(self, role: str) -> None:
        """Note that earlier removal orders are over."""
        self._ordered.pop(role, None)

    def cancel(self, role: str) -> list[str]:
        """Return draining replicas to service; return their names."""
        return self._release(role, list(self._since[role]))

    def described(self, role: str) -> list[dict[str, Any]]:
        """Return the drains ready for JSON; `since` is seconds since the Unix epoch."""
        epoch = self.clock.wall() - self.clock.now()
        return [
            {
                "name": one.name,
                "url": one.url,
                "inflight": one.inflight,
                "cached_blocks": one.cached_blocks,
                "state": "drain_ready" if self._is_empty(one, since, role) else "draining",
                "since": epoch + since,
            }
            for one, since in self._draining(role)
        ]

    def forget_gone(self, role: str) -> None:
        self._since[role] = {one.name: since for one, since in self._draining(role)}

    def _draining(self, role: str) -> list[tuple[DrainingReplica, float]]:
        """Return the draining replicas that exist, with the starts of their drains."""
        replicas = {one.name: one for one in self.pods.replicas(role)}
        return [(replicas[name], since) for name, since in self._since[role].items() if name in replicas]

    def _is_empty(self, replica: DrainingReplica, since: float, role: str) -> bool:
        if not replica.ready and not replica.draining:
            return True
        seconds = self.clock.now() - since
        return (seconds >= SETTLES and replica.inflight <= 0) or seconds >= self.settings.patience(role)

    def _release(self, role: str, names: Sequence[str]) -> list[str]:
        back = [name for name in names if name not in self._ordered.get(role, ())]
        for name in back:
            del self._since[role][name]
            self.pods.undrain(name)
        return back


@dataclass(frozen=True, slots=True)
class DrainingReplica:
    """One replica. `is_victim` is whether the autoscaler drains it. `cached_blocks` are counted by the prefix index,
    `ordinal` is the platform's number, `started` is in seconds, `group` is the value of `drain.groupLabel`: the set of
    roles that the replica serves with; None without it."""

    name: str
    ready: bool = True
    draining: bool = False
    is_victim: bool = False
    inflight: int = 0
    cached_blocks: int = 0
    ordinal: int | None = None
    started: float = 0.0
    url: str = ""
    group: str | None = None


def drain_order(replicas: Sequence[DrainingReplica], policy: DrainPolicy) -> list[DrainingReplica]:
    """Return the replicas of a role in the order of removal. least-loss: draining replicas, replicas that are not
    ready, replicas that are not the last of the role in their group; then the fewest requests in flight, the fewest
    cached blocks, the youngest. highest-ordinal is the order of platforms that do not choose."""
    if policy == "highest-ordinal":
        return sorted(replicas, key=lambda one: -1 if one.ordinal is None else one.ordinal, reverse=True)
    left, ordered = list(replicas), list[DrainingReplica]()
    while left:
        members = Counter(one.group for one in left)

        def loss(one: DrainingReplica, members: Counter[str | None] = members) -> tuple[Any, ...]:
            is_last = one.group is not None and members[one.group] == 1
            lost = (is_last, one.inflight, one.cached_blocks) if policy == "least-loss" else ()
            return (not one.draining, one.ready, *lost, -one.started, one.name)

        first = min(left, key=loss)
        left.remove(first)
        ordered.append(first)
    return ordered


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
