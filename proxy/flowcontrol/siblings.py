"""The other processes, of this host and of others, whose requests wait for room on the same pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

Lent = Mapping[str, Mapping[str, int] | None]
"""By name and by cap: how much one has ever given it; None: nothing that counts any more."""

Tell = Callable[[int | None, Lent, Sequence[str]], None]


class Siblings:
    """Of each cap each process has a part, and nobody goes beyond his: so all together never have more than the cap,
    however late they hear of each other. Who needs more waits, and says so. Then others give him what they have no use
    for, and what they have beyond the part of one that waits too; what is given counts here from the moment on in which
    it is said, and there from when it is heard.

    `tell` says the highest priority of those that wait here, None where nobody does; what was given since the last
    time, by who has it; and what is wanted: names of models, and of caps of the whole pool. Peers have numbers, which
    each process gives them, and a name, by which all know them.
    """

    def __init__(self, workers: int, tell: Tell, seat: int = 0, name: str = "0") -> None:
        """`seat`: which of so many of its host this one is."""
        self.workers = workers
        self.name = name
        self._seat = seat
        self._hosts, self._rank = 1, 0
        self._tell = tell
        self._waiting: dict[int, int] = {}
        """The highest priority that waits, by peer."""
        self._names: dict[int, str] = {}
        self._wants: dict[int, frozenset[str]] = {}
        self.told: int | None = None
        self.wants: Sequence[str] = ()
        """What was said last."""
        self.given: dict[str, Counter[str]] = {}
        self._got: dict[int, Counter[str]] = {}
        self._beyond: Counter[str] = Counter()
        """What was got, less what was given."""
        self._unsaid: dict[str, dict[str, int] | None] = {}

    @property
    def wait(self) -> bool:
        """Whether anybody does elsewhere."""
        return bool(self._waiting)

    def part(self, cap: str, most: int) -> int:
        """What of a cap is this process's. Hosts take turns in having what cannot be divided."""
        if self._hosts > 1:
            most = _part(most, self._hosts, (self._rank + crc32(cap.encode())) % self._hosts)
        return _part(most, self.workers, self._seat) + self._beyond[cap]

    def among(self, hosts: int, rank: int) -> None:
        """There are so many, and this one is which of them."""
        self._hosts, self._rank = hosts, rank

    @property
    def wanted(self) -> frozenset[str]:
        """By those that wait with the highest priority."""
        return frozenset().union(*(self._wants[peer] for peer in self._first()))

    def lend(self, cap: str, amount: int, wants: str) -> None:
        """Among those that want this; `say` tells them."""
        takers = [peer for peer in self._first() if wants in self._wants[peer]]
        for number, peer in enumerate(takers):
            share = amount // len(takers) + (number < amount % len(takers))
            if share:
                self._give(self._names[peer], cap, share)

    def say(self, highest: int | None, wants: Sequence[str] = ()) -> None:
        if highest != self.told or wants != self.wants or self._unsaid:
            unsaid, self._unsaid = self._unsaid, {}
            self.told, self.wants = highest, wants
            self._tell(highest, unsaid, wants)

    def take(self, peer: int, name: str, highest: int | None, lent: Lent, wants: Sequence[str]) -> None:
        self._names[peer] = name
        self._wants[peer] = frozenset(wants)
        if self.name in lent:
            self._get(peer, lent[self.name])
        if highest is None:
            self._waiting.pop(peer, None)
        else:
            self._waiting[peer] = highest

    def reset(self, peer: int) -> None:
        """It says anew what it has given."""
        self._waiting.pop(peer, None)
        self._get(peer, None)

    def vanished(self, peer: int) -> None:
        """Whoever comes in its place has its part anew, without what was given by it and to it. It may only be cut off:
        then it hears of it when it is back."""
        self.reset(peer)
        name = self._names.pop(peer, "")
        if self._take_back(name):
            self._unsaid[name] = None

    def cut_off(self, first: int) -> None:
        """Nobody hears of peers with this number or a larger one, nor they of this one: each has its own part again."""
        for peer in [peer for peer in self._names if peer >= first]:
            self.reset(peer)
            name = self._names.pop(peer)
            self._take_back(name)
            self._unsaid.pop(name, None)

    def go_first(self, highest: int, own: int, in_flight: int) -> bool:
        """Whether others should, where `own` of the requests in flight are of this process."""
        if not self._waiting:
            return False
        most = max(self._waiting.values())
        rivals = sum(1 for priority in self._waiting.values() if priority == highest)
        return most > highest or (most == highest and own * (rivals + 1) > in_flight)

    def _first(self) -> list[int]:
        highest = max(self._waiting.values(), default=None)
        return [peer for peer, priority in self._waiting.items() if priority == highest]

    def _give(self, name: str, cap: str, amount: int) -> None:
        given = self.given.setdefault(name, Counter())
        given[cap] += amount
        self._beyond[cap] -= amount
        unsaid = self._unsaid.get(name) or {}
        self._unsaid[name] = {**unsaid, cap: given[cap]}

    def _get(self, peer: int, lent: Mapping[str, int] | None) -> None:
        if lent is None:
            self._beyond.subtract(self._got.pop(peer, {}))
            return
        got = self._got.setdefault(peer, Counter())
        for cap, amount in lent.items():
            self._beyond[cap] += amount - got[cap]
            got[cap] = amount

    def _take_back(self, name: str) -> bool:
        """Whether there was something."""
        given = self.given.pop(name, None)
        self._beyond.update(given or {})
        return given is not None


def _part(most: int, of: int, seat: int) -> int:
    return most // of + (seat < most % of)
