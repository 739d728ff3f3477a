"""Empties pods that are to go: names them, waits for their last requests, lets them back when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.autoscale.acting import DrainSettings
from proxy.autoscale.victims import Replica, drain_order
from proxy.core.ports import Clock

SETTLES = 1.0
"""Seconds after which everybody has heard that a pod drains: until then one may still be sending it a request."""


class Pods(Protocol):
    """The replicas of one pool."""

    def replicas(self, role: str) -> Sequence[Replica]:
        """Those that are on their way out are none."""

    def drain(self, name: str) -> None: ...

    def undrain(self, name: str) -> None: ...


@dataclass(slots=True)
class Drains:
    """`doomed` are victims whose end was ordered: they are not let back in while that may still come."""

    settings: DrainSettings
    pods: Pods
    clock: Clock
    _since: dict[str, dict[str, float]] = field(default_factory=dict)
    """By role and pod."""
    _doomed: dict[str, set[str]] = field(default_factory=dict)

    def begin(self, role: str, count: int) -> list[str]:
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
        """Of those that drain."""
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
        """More are needed: those that drain serve again. Gives their names."""
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
