"""What was highest or lowest of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

Best = Callable[[Iterable[int]], int]
"""`max` or `min`."""


class _Window:
    """Values of the last `length` seconds; of length 0 it never holds any."""

    def __init__(self, best: Best, length: float) -> None:
        self._best = best
        self._length = length
        self._values: deque[tuple[float, int]] = deque()

    @property
    def length(self) -> float:
        """Where it changes, what was seen still counts, as far as the length reaches."""
        return self._length

    @length.setter
    def length(self, length: float) -> None:
        self._length = length
        if length <= 0:
            self._values.clear()

    def append(self, now: float, value: int) -> None:
        if self._length > 0:
            self._values.append((now, value))


class Records(_Window):
    """Counts a value from its moment until `length` seconds later."""

    def find(self, now: float) -> int | None:
        while self._values and self._values[0][0] + self._length < now:
            self._values.popleft()
        return self._best(value for _, value in self._values) if self._values else None


class Line(_Window):
    """A value holds until the next one is appended, and counts until `length` seconds after that; the last one counts
    for twice the length."""

    def find(self, now: float, current: int) -> int:
        """`current` always counts, too."""
        while len(self._values) > 1 and self._values[1][0] + self._length < now:
            self._values.popleft()
        if len(self._values) == 1 and self._values[0][0] + 2 * self._length < now:
            self._values.clear()
        return self._best([*(value for _, value in self._values), current])
