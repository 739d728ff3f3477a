"""Sizes that were ordered, for as long as the fleet may not show them yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.core.ports import Clock


@dataclass(slots=True)
class Orders:
    """Of one pool. An order is over when the role has the size, or after `startup` seconds: then what is there counts
    again, and it may be ordered anew."""

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
