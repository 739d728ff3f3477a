"""Between how many hosts caps are divided, as hosts and their store come and go."""

from __future__ import annotations

from typing import Literal

from proxy.cluster.membership import HostDivision
from proxy.core.ports import ManualClock


class World:
    def __init__(self, policy: Literal["localShare", "open"] = "localShare") -> None:
        self.clock = ManualClock(now=100.0)
        self.places: list[tuple[int, int, bool]] = []
        self.shares = HostDivision(b"m", policy, 5.0, self.clock, lambda *place: self.places.append(place))

    @property
    def place(self) -> tuple[int, int, bool]:
        """The number of hosts, the index of this one, and whether it receives the others' packets."""
        return self.shares.place


def test_hosts_divide_a_limit_in_the_order_of_their_ids() -> None:
    world = World()
    assert world.place == (1, 0, False)
    world.shares.divide([b"a"])
    assert world.place == (1, 0, False), "no peer knows this one yet"
    world.shares.found()
    world.shares.divide([b"z", b"a"])
    assert world.place == (3, 1, True)
    world.shares.divide([b"a", b"z"])
    assert world.places == [(1, 0, True), (3, 1, True)], "only changes are published"
    world.shares.divide([b"z"])
    assert world.place == (2, 0, True)


def test_without_the_store_the_division_stays() -> None:
    world = World()
    world.shares.found()
    world.shares.divide([b"a", b"z"])
    world.shares.lost()
    world.shares.divide([])
    assert world.place == (3, 1, False)


def test_with_an_open_policy_each_has_the_whole_limit_then() -> None:
    world = World("open")
    world.shares.found()
    world.shares.divide([b"a"])
    world.shares.lost()
    assert world.place == (1, 0, False)
    world.shares.found()
    world.shares.divide([])
    assert world.place == (2, 1, True), "the other one may be on its way back"


def test_earlier_hosts_count_for_a_lease_after_the_store_returns_unless_they_stop() -> None:
    world = World()
    world.shares.found()
    world.shares.divide([b"a", b"z"])
    world.shares.lost()
    world.shares.found()
    world.shares.divide([b"a"])
    assert world.place == (3, 1, True)
    world.shares.left(b"z")
    world.shares.divide([b"a"])
    assert world.place == (2, 1, True)
    world.shares.divide([])
    assert world.place == (2, 1, True)
    world.clock.advance(5.0)
    world.shares.divide([])
    assert world.place == (1, 0, True)
