"""The other workers of the host, who wait for room on the same pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

Lent = Mapping[int, Mapping[str, int]]
"""By worker and by cap: how much one has ever given it."""


class Siblings:
    """Of each cap each worker has a part, and nobody goes beyond his: so all together never have more than the cap,
    however late they hear of each other. Who needs more waits, and says so. Then others give him what they have no use
    for, and what they have beyond the part of one that waits too; what is given counts here from the moment on in which
    it is said, and there from when it is heard.

    `tell` says the highest priority of those that wait here, None where nobody does, and all that was given.
    """

    def __init__(self, workers: int, tell: Callable[[int | None, Lent], None], seat: int = 0, number: int = 0) -> None:
        """`seat`: which of so many this one is; `number`: how others call it."""
        self.workers = workers
        self._seat = seat
        self._number = number
        self._tell = tell
        self._waiting: dict[int, int] = {}
        """The highest priority that waits, by worker."""
        self.told: int | None = None
        """What was said last."""
        self.given: dict[int, Counter[str]] = {}
        self._got: dict[int, Counter[str]] = {}
        self._has_given = False

    @property
    def wait(self) -> bool:
        """Whether anybody does elsewhere."""
        return bool(self._waiting)

    def part(self, cap: str, most: int) -> int:
        """What of a cap is this worker's."""
        mine = most // self.workers + (self._seat < most % self.workers)
        return mine + sum(got[cap] for got in self._got.values()) - sum(given[cap] for given in self.given.values())

    def lend(self, cap: str, amount: int) -> None:
        """Among those that wait; `say` tells them."""
        takers = [peer for peer, highest in self._waiting.items() if highest == max(self._waiting.values())]
        for number, peer in enumerate(takers):
            share = amount // len(takers) + (number < amount % len(takers))
            self.given.setdefault(peer, Counter())[cap] += share
        self._has_given = True

    def say(self, highest: int | None) -> None:
        if highest != self.told or self._has_given:
            self.told, self._has_given = highest, False
            self._tell(highest, self.given)

    def take(self, peer: int, highest: int | None, lent: Lent) -> None:
        self._got[peer] = Counter(lent.get(self._number, {}))
        if highest is None:
            self._waiting.pop(peer, None)
        else:
            self._waiting[peer] = highest

    def vanished(self, peer: int) -> None:
        """Whoever comes in its place has its part anew, without what was given by it and to it."""
        for known in (self._waiting, self._got, self.given):
            known.pop(peer, None)

    def go_first(self, highest: int, own: int, in_flight: int) -> bool:
        """Whether others should, where `own` of the requests in flight are of this worker."""
        if not self._waiting:
            return False
        most = max(self._waiting.values())
        rivals = sum(1 for priority in self._waiting.values() if priority == highest)
        return most > highest or (most == highest and own * (rivals + 1) > in_flight)
