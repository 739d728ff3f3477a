"""What keys and tenants have had of their limits, known to all workers of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import Protocol

import orjson

from proxy.replicas.wire import Garbled, Kind

PER_RECORD = 100

Who = tuple[str, str, str]
"""Kind (key or tenant), name, and the name of the limits."""

Tell = Callable[[Kind, bytes], None]


class Book(Protocol):
    """`access.gate.LimitsGate` is one. `running` are the requests that a worker has at the moment; `spent` was charged,
    and `used` is all that still counts, limit by limit."""

    on_spent: Callable[[Who, int, Sequence[float]], None] | None

    def among(self, hosts: int) -> None:
        """So many share the limits, and hear of each other."""

    def spent_elsewhere(self, peer: int, who: Who, running: int, spent: Sequence[float]) -> None: ...
    def used_elsewhere(self, peer: int, who: Who, running: int, used: Sequence[float]) -> None: ...
    def vanished(self, peer: int) -> None: ...
    def known(self) -> Iterable[tuple[Who, int, Sequence[float]]]:
        """Who was limited, the requests that run here, and what was used."""


class SharedLimits:
    """Every charge is told when it is made, so all processes count alike. Until it is known, what each may let in is
    the book's to say."""

    def __init__(self, book: Book, tell: Tell) -> None:
        self._book = book
        self._tell = tell
        book.on_spent = self._spent
        self.among = book.among

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        taken = list(entries(body))
        take = self._book.spent_elsewhere if kind is Kind.SPENT else self._book.used_elsewhere
        for who, running, numbers in taken:
            take(peer, who, running, numbers)

    def vanished(self, peer: int) -> None:
        self._book.vanished(peer)

    def in_flight(self) -> Iterator[bytes]:
        """Bodies of USED, about those who have requests here."""
        return _bodies([entry for entry in self._book.known() if entry[1]])

    def memory(self) -> Iterator[bytes]:
        """Bodies of USED."""
        return _bodies(list(self._book.known()))

    def _spent(self, who: Who, running: int, spent: Sequence[float]) -> None:
        self._tell(Kind.SPENT, orjson.dumps([(who, running, spent)]))


def _bodies(entries: Sequence[tuple[Who, int, Sequence[float]]]) -> Iterator[bytes]:
    for start in range(0, len(entries), PER_RECORD):
        yield orjson.dumps(entries[start : start + PER_RECORD])


def entries(body: bytes) -> Iterator[tuple[Who, int, Sequence[float]]]:
    try:
        for (kind, name, of), running, numbers in orjson.loads(body):
            first, second, third, fourth, fifth = map(float, numbers)
            if not isfinite(first + second + third + fourth + fifth) or running < 0:
                raise ValueError
            yield (str(kind), str(name), str(of)), int(running), (first, second, third, fourth, fifth)
    except (ValueError, TypeError, OverflowError):
        raise Garbled("limits that are none") from None
