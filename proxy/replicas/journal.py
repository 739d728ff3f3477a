"""What was confirmed lately, so that a process that joins can be told: bounded in bytes, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from proxy.prefix.hashing import Chain
from proxy.prefix.reservation import Span

NEAR = 3
"""Segments before the end of a prompt at whose ends one is looked for that it goes on from."""

Key = tuple[int, int]
"""The pod's number, and the last hash of a chain."""


class Journal:
    """Packed chains. One that is confirmed again is moved to the end and not kept twice."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._era = 1
        self._entries: OrderedDict[Key, tuple[bytes, int]] = OrderedDict()
        """And the era in which all processes were told, 0: nobody knows whether they were."""

    def add(self, key: Key, chain: bytes, all_know: bool) -> None:
        self.add_all(((0, key, chain),), all_know)

    def add_all(self, rows: Iterable[tuple[int, Key, bytes]], all_know: bool) -> None:
        """Each of some number that is of no use here, a key, and a chain."""
        entries, size, era = self._entries, self._size, self._era if all_know else 0
        pop = entries.pop
        for _, key, chain in rows:
            if (before := pop(key, None)) is not None:
                size -= len(before[0])
            entries[key] = chain, era
            size += len(chain)
        while size > self._most:
            size -= len(entries.popitem(last=False)[1][0])
        self._size = size

    def get(self, key: Key) -> bytes | None:
        entry = self._entries.get(key)
        return entry and entry[0]

    def longest_known(self, pod: int, span: Span) -> bytes:
        """What all processes know of a chain: one is looked for that ends where the pod's memory does, for that is
        where a turn goes on from another one, or where one of the last segments before does."""
        chain, length, at, way = span
        if not at:
            return b""
        entry = self._entries.get((pod, chain[at - 1]))  # as `_known`, for here most are found
        if entry is not None and entry[1] == self._era and len(entry[0]) == 8 * at:
            return entry[0]
        end = length
        for holding in way[: -NEAR - 1 : -1]:
            end -= len(holding.segment.hashes)
            if 0 < end < at and (found := self._known(pod, chain, end)):
                return found
        return b""

    def _known(self, pod: int, chain: Chain, length: int) -> bytes:
        entry = self._entries.get((pod, chain[length - 1]))
        return entry[0] if entry is not None and entry[1] == self._era and len(entry[0]) == 8 * length else b""

    def begin_anew(self) -> None:
        """From now on nobody is taken to know anything that was told before."""
        self._era += 1

    def forget(self, pod: int) -> None:
        for key in [key for key in self._entries if key[0] == pod]:
            self._size -= len(self._entries.pop(key)[0])

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """A copy of the moment, in the order of their last confirmation."""
        return iter([(pod, chain) for (pod, _), (chain, _) in self._entries.items()])

    def latest(self, most_bytes: int) -> list[tuple[int, bytes]]:
        """As much of its end as fits."""
        found: list[tuple[int, bytes]] = []
        for (pod, _), (chain, _) in reversed(self._entries.items()):
            most_bytes -= len(chain)
            if most_bytes < 0:
                break
            found.append((pod, chain))
        return found[::-1]

    @property
    def size(self) -> int:
        return self._size
