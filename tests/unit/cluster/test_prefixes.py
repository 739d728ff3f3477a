"""Prefix indexes of several processes, kept alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.cluster.messages import UNREADABLE, InvalidMessage, RecordKind, records
from proxy.cluster.prefixes import WHOLE_CHAINS_EVERY, IndexChanges, SharedIndex, index_tag
from proxy.cluster.shared import pod_number
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.prefix.forest import Reservation
from proxy.prefix.hashing import DEPTHS, Chain
from tests.helpers.examples import examples

CAPACITY = 1000
NAMES = ("a", "b")


class Peer:
    """A process with two pods; `published` collects its records."""

    def __init__(self, number: int, tag: int = 1) -> None:
        self.number = number
        self.pods = {name: Endpoint(name) for name in NAMES}
        self._published: list[tuple[RecordKind, bytes]] = []
        self.clock = ManualClock()
        self.index = SharedIndex(
            self.clock,
            1 << 20,
            tag=tag,
            touch=lambda: None,
            find=lambda number: {pod_number(name): pod for name, pod in self.pods.items()}.get(number),
        )

    @property
    def published(self) -> list[tuple[RecordKind, bytes]]:
        self._published.extend(records(self.index.collect_changes()))
        return self._published

    def reserve(self, chain: Chain, pod: str = "a") -> Reservation:
        return self.index.reserve((chain,), self.pods[pod], CAPACITY)

    def match(self, chain: Chain) -> dict[str, int]:
        return {endpoint.name: depth for endpoint, depth in self.index.match(chain).items()}

    def hear(self, *others: Peer) -> None:
        for other in others:
            for kind, body in other.published:
                self.index.receive(other.number, kind, body)


def attempt(*peers: Peer) -> None:
    """All published messages reach all peers."""
    for peer in peers:
        peer.hear(*(other for other in peers if other is not peer))
    for peer in peers:
        peer.published.clear()


def test_a_burst_of_siblings_is_known_before_any_response() -> None:
    here, there = Peer(1), Peer(2)
    here.reserve([1, 2, 3])
    attempt(here, there)
    assert there.match([1, 2, 3, 4]) == {"a": 3}


def test_a_peer_keeps_confirmed_blocks_and_drops_failed_ones() -> None:
    here, there = Peer(1), Peer(2)
    good, bad = here.reserve([1, 2, 3]), here.reserve([1, 8, 9], "b")
    attempt(here, there)
    here.index.confirm(good)
    here.index.release(bad)
    attempt(here, there)
    assert there.match([1, 2, 3]) == {"a": 3}
    assert there.match([1, 8, 9]) == {"a": 1}


def test_unconfirmed_blocks_of_a_removed_peer_are_dropped() -> None:
    here, there = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2]))
    here.reserve([7, 8, 9])
    attempt(here, there)
    there.index.vanished(here.number)
    assert there.match([1, 2]) == {"a": 2}
    assert there.match([7, 8, 9]) == {}


def test_a_pod_that_lost_its_cache_is_cleared_everywhere() -> None:
    here, there = Peer(1), Peer(2)
    chain = list(range(1, 11))
    here.index.confirm(here.reserve(chain))
    for _ in range(3):
        reservation = here.reserve(chain)
        here.index.confirm(reservation)
        here.index.observe(reservation, 640, 0)
    attempt(here, there)
    assert here.match(chain) == there.match(chain) == {}


def test_received_blocks_are_not_published_again() -> None:
    here, there = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2]))
    there.hear(here)
    assert there.published == []


def test_a_prompt_without_blocks_publishes_nothing() -> None:
    here = Peer(1)
    here.index.confirm(here.index.reserve((), here.pods["a"], CAPACITY))
    assert here.published == []


def test_an_index_of_another_configuration_is_unchanged() -> None:
    assert index_tag("approx", 64) != index_tag("approx", 128)
    here, there = Peer(1, index_tag("approx", 64)), Peer(2, index_tag("approx", 128))
    here.reserve([1, 2])
    attempt(here, there)
    assert there.match([1, 2]) == {}


def test_a_new_peer_gets_confirmed_and_reserved_blocks() -> None:
    here, third, joins = Peer(1), Peer(3), Peer(2)
    third.index.confirm(third.reserve([5, 6], "b"))
    attempt(here, third)
    here.index.confirm(here.reserve([1, 2, 3]))
    here.reserve([1, 2, 9])
    here.published.clear()
    for kind, body in here.index.current():
        joins.index.receive(1, kind, body)
    for kind, body in here.index.lasting(1.0):
        joins.index.receive(1, kind, body)
    for chain in ([1, 2, 3], [1, 2, 9], [5, 6]):
        assert joins.match(chain) == here.match(chain) != {}
    joins.index.vanished(1)
    assert joins.match([1, 2, 9]) == {"a": 2}


def test_dropped_blocks_are_not_published() -> None:
    here = Peer(1)
    here.index.confirm(here.reserve([1, 2, 3]))
    here.published.clear()
    here.index.forget(here.pods["a"])
    assert list(here.index.lasting(1.0)) == []


def test_a_repeated_announcement_is_settled_at_once() -> None:
    here, there = Peer(1), Peer(2)
    reservation = here.reserve([1, 2])
    there.hear(here)
    there.hear(here)
    here.published.clear()
    here.index.release(reservation)
    there.hear(here)
    assert there.match([1, 2]) == {}


def test_unknown_pods_and_reservations_are_skipped() -> None:
    here, there = Peer(1), Peer(2)
    reservation = here.reserve([1, 2])
    here.index.confirm(reservation)
    del there.pods["a"]
    attempt(here, there)
    assert there.match([1, 2]) == {}


@given(st.binary(max_size=60), st.sampled_from([RecordKind.MOVES, RecordKind.FORGET, RecordKind.MEMORY]))
def test_malformed_messages_are_harmless(garbage: bytes, kind: RecordKind) -> None:
    here = Peer(1)
    here.index.confirm(here.reserve([1, 2]))
    with suppress(*UNREADABLE):
        here.index.receive(9, kind, (1).to_bytes(4, "little") + garbage)
    assert here.match([1, 2]) == {"a": 2}


def test_a_prompt_that_extends_a_known_one_is_published_from_there() -> None:
    here, there = Peer(1), Peer(2)
    turns = [list(range(1, 31)), list(range(1, 36)), list(range(1, 41))]
    sizes = []
    for turn in turns:
        reservation = here.reserve(turn)
        sizes.append(len(here.published[-1][1]))
        attempt(here, there)
        assert there.match(turn) == {"a": len(turn)}
        here.index.confirm(reservation)
        attempt(here, there)
    assert sizes[1] == sizes[2] == sizes[0] - 8 * (30 - 6)
    assert list(there.index.lasting(1.0)) == list(here.index.lasting(1.0))
    there.index.vanished(1)
    assert there.match(turns[-1]) == {"a": 40}


def test_a_peer_that_joined_in_between_gets_the_whole_prompt() -> None:
    here, joins = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2, 3]))
    here.published.clear()
    here.reserve([1, 2, 3, 4])
    attempt(here, joins)
    assert joins.match([1, 2, 3, 4]) == {}
    here.index.publish_whole_chains()
    for kind, body in here.index.current():
        joins.index.receive(1, kind, body)
    assert joins.match([1, 2, 3, 4]) == {"a": 4}
    here.reserve([1, 2, 3, 5])
    attempt(here, joins)
    assert joins.match([1, 2, 3, 5]) == {"a": 4}


def test_a_peer_without_the_prefix_knows_the_prompt_a_minute_later() -> None:
    here, forgetful = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2, 3]))
    attempt(here, forgetful)
    forgetful.index.forget(forgetful.pods["a"])
    here.reserve([1, 2, 3, 4])
    attempt(here, forgetful)
    assert forgetful.match([1, 2, 3, 4]) == {}
    here.clock.advance(WHOLE_CHAINS_EVERY)
    here.reserve([1, 2, 3, 5])
    attempt(here, forgetful)
    assert forgetful.match([1, 2, 3, 5]) == {"a": 4}


def test_for_a_cleared_pod_whole_prompts_are_published() -> None:
    here, there = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2, 3]))
    attempt(here, there)
    here.index.lost(here.pods["a"])
    here.index.forget(here.pods["a"])
    here.reserve([1, 2, 3, 4])
    attempt(here, there)
    assert there.match([1, 2, 3, 4]) == {"a": 4}


@pytest.mark.parametrize("cut", [1, 8, 17])
@pytest.mark.parametrize("kind", [RecordKind.MOVES, RecordKind.MEMORY])
def test_a_truncated_chain_is_refused(kind: RecordKind, cut: int) -> None:
    here, there = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2, 3]))
    ((_, moves),) = here.published
    body = moves if kind is RecordKind.MOVES else next(iter(here.index.lasting(1.0)))[1]
    with pytest.raises(InvalidMessage):
        there.index.receive(1, kind, body[:-cut])
    assert there.match([1, 2, 3]) == {}


def test_a_chain_longer_than_any_prompt_is_refused() -> None:
    there, too_many = Peer(2), len(DEPTHS)
    moves = IndexChanges(reserved=[2, 0, too_many], hashes=[bytes(8 * too_many)], pods=[(pod_number("a"), CAPACITY)])
    with pytest.raises(InvalidMessage):
        there.index.receive(1, RecordKind.MOVES, moves.packed(1))
    assert there.match([0]) == {}


@pytest.mark.parametrize("reserved", [[2, 1, 1], [2, 0, 0], [2, 0, 2], [2, 0]])
def test_a_chain_on_no_pod_or_without_its_hashes_is_refused(reserved: list[int]) -> None:
    there = Peer(2)
    with pytest.raises(InvalidMessage):
        there.index.receive(
            1, RecordKind.MOVES, IndexChanges([], reserved, [bytes(8)], [(pod_number("a"), CAPACITY)]).packed(1)
        )
    assert there.match([0]) == {}


def test_a_reservation_that_ends_within_a_batch_is_known_as_if_published_at_once() -> None:
    here, there = Peer(1), Peer(2)
    good, bad = here.reserve([1, 2, 3]), here.reserve([4, 5, 6])
    here.index.confirm(good)
    here.index.release(good)
    here.index.release(bad)
    here.index.confirm(here.reserve([1, 2, 3, 7]))
    attempt(here, there)
    assert there.match([1, 2, 3, 7]) == {"a": 4}
    assert there.match([4, 5, 6]) == {}
    assert list(there.index.lasting(1.0)) == list(here.index.lasting(1.0))


def test_reservations_before_a_reset_are_published_before_it() -> None:
    here, there = Peer(1), Peer(2)
    here.index.confirm(here.reserve([1, 2, 3]))
    here.index.lost(here.pods["a"])
    here.index.confirm(here.reserve([4, 5, 6]))
    attempt(here, there)
    assert there.match([1, 2, 3]) == {}
    assert there.match([4, 5, 6]) == {"a": 3}


def test_a_turn_that_extends_a_prompt_of_another_process_is_published_from_there() -> None:
    here, there, third = Peer(1), Peer(2), Peer(3)
    here.index.confirm(here.reserve(list(range(1, 31))))
    attempt(here, there, third)
    there.reserve(list(range(1, 36)))
    ((_, body),) = there.published
    assert len(body) < 8 * 30
    attempt(here, there, third)
    assert third.match(list(range(1, 36))) == here.match(list(range(1, 36))) == {"a": 35}


def test_a_known_prompt_is_published_by_its_end() -> None:
    here, there = Peer(1), Peer(2)
    for _ in range(2):
        here.index.confirm(here.reserve(list(range(1, 31))))
        attempt(here, there)
    again = here.reserve(list(range(1, 31)))
    assert len(here.published[-1][1]) < 80
    attempt(here, there)
    here.index.confirm(again)
    attempt(here, there)
    assert list(there.index.lasting(1.0)) == list(here.index.lasting(1.0))


def test_several_prompts_of_a_request_are_published_and_settled_together() -> None:
    here, there = Peer(1), Peer(2)
    reservation = here.index.reserve(([1, 2, 3], [], [1, 2, 9]), here.pods["a"], CAPACITY)
    attempt(here, there)
    assert there.match([1, 2, 9]) == {"a": 3}
    here.index.release(reservation)
    attempt(here, there)
    assert there.match([1, 2, 3]) == there.match([1, 2, 9]) == {}


def test_peers_weight_deep_blocks_equally() -> None:
    here, there = Peer(1), Peer(2)
    long = list(range(1, 161))
    here.index.confirm(here.reserve(long))
    here.index.confirm(here.reserve([*long[:100], 1000]))
    attempt(here, there)
    assert there.match(long) == here.match(long) == {"a": 512}
    assert there.index.blocks(there.pods["a"]) == here.index.blocks(here.pods["a"])


CHAINS = [[1, 2, 3], [1, 2, 4, 5], [1, 6], [7, 8, 9, 10], [7, 8, 11]]
STEP = st.tuples(st.integers(0, 2), st.sampled_from(["reserve", "confirm", "release", "say"]), st.integers(0, 9))


@settings(max_examples=examples(150))
@given(st.lists(STEP, max_size=40))
def test_eventually_all_processes_agree(steps: Sequence[tuple[int, str, int]]) -> None:
    peers = [Peer(number) for number in (1, 2, 3)]
    open_: list[list[Reservation]] = [[], [], []]
    for who, what, which in steps:
        mine = open_[who]
        if what == "reserve":
            mine.append(peers[who].reserve(CHAINS[which % len(CHAINS)], NAMES[which % 2]))
        elif what == "say":
            attempt(*peers)
        elif mine:
            settle = getattr(peers[who].index, what)
            settle(mine.pop(which % len(mine)))
    for peer, mine in zip(peers, open_, strict=True):
        for reservation in mine:
            peer.index.confirm(reservation)
    attempt(*peers)
    for chain in CHAINS:
        assert peers[0].match(chain) == peers[1].match(chain) == peers[2].match(chain)


def test_blocks_of_a_removed_pod_do_not_pass_to_its_successor() -> None:
    here, there = Peer(1), Peer(2)
    reservation = here.reserve([1, 2, 3])
    here.index.forget(here.pods["a"])
    here.index.confirm(reservation)
    attempt(here, there)
    assert there.match([1, 2, 3]) == {}


def test_a_reset_of_a_pod_is_published_at_once() -> None:
    here, flushed = Peer(1), list[bytes]()
    here.index._flush = lambda: flushed.append(here.index.collect_changes())
    here.index.confirm(here.reserve([1, 2, 3]))
    assert not flushed
    here.index.lost(here.pods["a"])
    assert [kind for kind, _ in records(flushed[0])][-1] is RecordKind.FORGET


def test_a_prompt_that_extends_the_middle_of_another_is_published_from_there() -> None:
    """Of a prompt that differs from a published one, where one of its last segments ends."""
    here, there = Peer(1), Peer(2)
    published = list(range(1, 41))
    here.index.confirm(here.reserve(published))
    attempt(here, there)
    here.index.confirm(here.reserve([*published, 50, 51]))
    attempt(here, there)
    other = [*published, 50, 61]
    here.reserve(other)
    ((_, body),) = here.published
    assert len(IndexChanges.read(body).hashes[0]) == 8 * 3
    attempt(here, there)
    assert there.match(other) == {"a": 42}
