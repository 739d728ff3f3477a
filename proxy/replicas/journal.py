"""What was confirmed lately, so that a process that joins can be told: bounded in bytes, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

Key = tuple[str, bytes]


class Journal:
    """(pod, packed chains). A prompt that is confirmed again is moved to the end and not kept twice."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._entries: OrderedDict[Key, bytes] = OrderedDict()

    def add(self, pod: str, chains: bytes) -> None:
        key = (pod, chains[-8:])
        self._size += len(chains) - len(self._entries.pop(key, b""))
        self._entries[key] = chains
        while self._size > self._most:
            self._size -= len(self._entries.popitem(last=False)[1])

    def get(self, pod: str, last: bytes) -> bytes | None:
        """The chains that end with this hash."""
        return self._entries.get((pod, last))

    def forget(self, pod: str) -> None:
        for key in [key for key in self._entries if key[0] == pod]:
            self._size -= len(self._entries.pop(key))

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """A copy of the moment, in the order of their last confirmation."""
        return iter([(pod, chains) for (pod, _), chains in self._entries.items()])

    def latest(self, most_bytes: int) -> list[tuple[str, bytes]]:
        """As much of its end as fits."""
        found: list[tuple[str, bytes]] = []
        for (pod, _), chains in reversed(self._entries.items()):
            most_bytes -= len(chains)
            if most_bytes < 0:
                break
            found.append((pod, chains))
        return found[::-1]

    @property
    def size(self) -> int:
        return self._size
