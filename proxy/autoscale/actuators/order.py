"""What an actuator is told, and the port that all of them are behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.autoscale.decision import Decision
from proxy.autoscale.loop import Outcome


@dataclass(frozen=True, slots=True)
class Order:
    """Bring `role` from `current` replicas to `count`. `victims` are names of pods that should go: they are empty."""

    decision: Decision
    role: str
    current: int
    count: int
    victims: tuple[str, ...] = ()

    @property
    def pool(self) -> str:
        return self.decision.pool

    @property
    def key(self) -> str:
        """The same for the same wish of the same decision, however often it is sent."""
        return f"{self.pool}/{self.role}/{self.decision.id}/{self.count}"

    def as_dict(self) -> dict[str, Any]:
        """In JSON: the decision, and what of it this is."""
        order = {"role": self.role, "current": self.current, "desired": self.count, "victims": list(self.victims)}
        return {**self.decision.as_dict(), "order": order}


class Hand:
    """An actuator of one kind. What it cannot do now is BUSY, what it must not do REFUSED; anything raised is an
    ERROR."""

    async def scale(self, order: Order) -> Outcome:
        """Does nothing where the role has the size already."""
        raise NotImplementedError

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        """These pods are to go next, or no longer are; where nobody asks who goes it does nothing."""
