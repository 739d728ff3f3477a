"""What the others are taken to spend while nobody hears of them: as much as this host does, each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from proxy.replicas.limits import Who, entries
from proxy.replicas.wire import Kind, record, records

Spent = Callable[[bytes], None]


class Absence:
    """`spent(batch)` gets what they are taken to spend. What really was, nobody learns: it is not told again, so
    nothing is counted twice."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent
        self._others = 0
        self._running: dict[Who, dict[int, int]] = {}
        """Requests by the member of this host that has them."""

    def begin(self, others: int) -> None:
        """So many there were."""
        self._others = others
        self._running.clear()

    def end(self) -> None:
        self._others = 0

    def take(self, member: int, batch: bytes) -> None:
        """Raises Garbled."""
        if not self._others:
            return
        taken = [self._as_others(member, *entry) for kind, body in records(batch) for entry in _spent(kind, body)]
        if taken:
            self._spent(record(Kind.SPENT, orjson.dumps(taken)))

    def _as_others(self, member: int, who: Who, running: int, spent: Sequence[float]) -> tuple[Who, int, list[float]]:
        self._running.setdefault(who, {})[member] = running
        all_running = sum(self._running[who].values())
        return who, all_running * self._others, [amount * self._others for amount in spent]


def _spent(kind: Kind, body: bytes) -> list[tuple[Who, int, Sequence[float]]]:
    return list(entries(body)) if kind is Kind.SPENT else []
