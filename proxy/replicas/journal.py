"""What was confirmed lately, so that a process that joins can be told: bounded in bytes, oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from proxy.prefix.hashing import Chain
from proxy.prefix.holdings import Holding

NEAR = 3
"""Segments before the end of a prompt at whose ends one is looked for that it goes on from."""

Key = tuple[int, int]
"""The pod's number, and the last hash of a chain."""


class Journal:
    """Packed chains. One that is confirmed again is moved to the end and not kept twice."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._entries: dict[Key, bytes] = {}
        self.known: dict[Key, bytes] = {}
        """Those of them that all processes were told of since `begin_anew`; to be looked at."""

    def add(self, key: Key, chain: bytes, all_know: bool) -> None:
        self.add_all({key: chain}, all_know)

    def add_all(self, chains: dict[Key, bytes], all_know: bool) -> None:
        """On the hot path, so nothing is done one by one."""
        entries = self._entries
        self._drop(entries.keys() & chains.keys())
        entries.update(chains)
        self._size += sum(map(len, chains.values()))
        if all_know:
            self.known.update(chains)
        if self._size > self._most:
            self._shrink()

    def get(self, key: Key) -> bytes | None:
        return self._entries.get(key)

    def nearest(self, pod: int, chain: Chain, length: int, at: int, way: Sequence[Holding]) -> bytes:
        """What all processes know of a span whose first `at` hashes the pod has: `known` has the chain that ends there
        if a turn goes on from another one; else one is looked for that ends where one of the last segments does."""
        end = length
        for holding in way[: -NEAR - 1 : -1]:
            end -= len(holding.segment.hashes)
            if 0 < end < at:
                found = self.known.get((pod, chain[end - 1]))
                if found is not None and len(found) == 8 * end:
                    return found
        return b""

    def begin_anew(self) -> None:
        """From now on nobody is taken to know anything that was told before."""
        self.known.clear()

    def forget(self, pod: int) -> None:
        self._drop([key for key in self._entries if key[0] == pod])

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """A copy of the moment, in the order of their last confirmation."""
        return iter([(pod, chain) for (pod, _), chain in self._entries.items()])

    def latest(self, most_bytes: int) -> list[tuple[int, bytes]]:
        """As much of its end as fits."""
        found: list[tuple[int, bytes]] = []
        for (pod, _), chain in reversed(self._entries.items()):
            most_bytes -= len(chain)
            if most_bytes < 0:
                break
            found.append((pod, chain))
        return found[::-1]

    @property
    def size(self) -> int:
        return self._size

    def _shrink(self) -> None:
        """By a sixteenth more than it has to: a dictionary whose first entries go takes a while to find the next.
        Others do so at other moments, so they are not taken to know what would go next."""
        part = self._most // 16
        left, oldest = self._size, list[Key]()
        for key, chain in self._entries.items():
            if left <= self._most - 2 * part:
                break
            if left > self._most - part:
                oldest.append(key)
            else:
                self.known.pop(key, None)
            left -= len(chain)
        self._drop(oldest)

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._size -= len(self._entries.pop(key))
            self.known.pop(key, None)
