"""Which other processes there are, and what of them was missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.membership import ASK_PAUSE, Peer, Peers, peer_id
from proxy.cluster.messages import FIRST_NUMBER, HOST_BYTES, Packet, PacketKind, packet
from proxy.core.ports import ManualClock
from tests.helpers.cluster.replicas import bare_replica

LEASE = 5.0
OWN, ONE, TWO = b"own-h", b"one-h", b"two-h"


class Ear:
    """Hears packets, and keeps who is gone."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gone: list[int] = []
        self.changes = 0
        self.peers = Peers(OWN, self.clock, LEASE, self.gone.append)
        self.peers.changed = self._changed

    def hear(self, kind: PacketKind, number: int, host: bytes = ONE, member: int = 1) -> Peer | None:
        to = peer_id(OWN, 1) if kind in (PacketKind.ASK, PacketKind.STATE) else None
        return self.peers.receive(packet(kind, peer_id(host, member), number, b"", to))

    def known(self, number: int, host: bytes = ONE, member: int = 1) -> Peer:
        found = self.hear(PacketKind.HELLO, number, host, member)
        assert found is not None
        return found

    def _changed(self) -> None:
        self.changes += 1


def test_a_peer_that_is_silent_for_a_lease_is_removed() -> None:
    ear = Ear()
    numbers = [ear.known(1, member=member).number for member in (1, 2)]
    ear.clock.advance(LEASE - 0.1)
    ear.hear(PacketKind.BEAT, 2)
    ear.clock.advance(LEASE - 0.1)
    ear.peers.sweep()
    assert ear.gone == numbers[1:]
    ear.clock.advance(0.2)
    ear.peers.sweep()
    assert ear.gone == numbers[::-1]
    assert not ear.peers.hosts
    assert ear.changes == 4


def test_one_of_this_host_is_not_given_up_for_its_silence_only_for_its_end() -> None:
    ear = Ear()
    sibling = ear.known(1, OWN, 7)
    assert (sibling.number, sibling.is_local) == (7, True)
    ear.clock.advance(10 * LEASE)
    ear.peers.sweep()
    assert not ear.gone
    assert ear.peers.received_at(7) == 0.0
    ear.hear(PacketKind.BEAT, 2, OWN, 7)
    assert ear.peers.received_at(7) == 10 * LEASE
    ear.peers.forget(sibling)
    ear.peers.forget(sibling)
    assert ear.gone == [7]


def test_processes_of_other_hosts_get_numbers_that_were_never_used() -> None:
    ear = Ear()
    one, two, three = ear.known(1), ear.known(1, member=7), ear.known(1, TWO)
    numbers = {one.number, two.number, three.number}
    assert len(numbers) == 3
    assert min(numbers) >= FIRST_NUMBER
    assert ear.known(2).number == one.number
    ear.peers.forget(one)
    assert ear.known(3).number not in numbers


def test_hosts_are_known_by_what_one_of_their_processes_says() -> None:
    ear = Ear()
    ear.known(1, member=1)
    assert ear.peers.hosts == {ONE: ("", "")}
    ear.known(1, member=0).name = "left"
    ear.known(1, member=2)
    ear.known(1, OWN, 3)
    assert ear.peers.hosts == {ONE: ("left", "")}
    assert len(ONE) == HOST_BYTES


def test_overtaken_packets_are_ignored() -> None:
    ear = Ear()
    ear.known(5)
    assert ear.hear(PacketKind.NEWS, 4) is None
    assert ear.hear(PacketKind.NEWS, 5) is None
    assert ear.hear(PacketKind.STATE, 4) is None
    assert ear.hear(PacketKind.STATE, 5) is not None
    assert ear.hear(PacketKind.NEWS, 6) is not None


def test_what_is_for_one_host_or_process_has_no_number() -> None:
    ear = Ear()
    peer = ear.known(5, OWN)
    for kind in (PacketKind.DIRECT, PacketKind.ASK):
        assert ear.hear(kind, 0, OWN) is peer
    assert peer.last == 5
    assert not peer.has_gap


def test_a_missed_packet_is_requested_periodically_until_a_response() -> None:
    ear = Ear()
    peer = ear.known(1)
    ear.hear(PacketKind.NEWS, 2)
    assert not ear.peers.should_ask(peer)
    ear.hear(PacketKind.NEWS, 4)
    assert ear.peers.should_ask(peer)
    assert not ear.peers.should_ask(peer)
    ear.clock.advance(ASK_PAUSE)
    assert ear.peers.should_ask(peer)
    ear.hear(PacketKind.STATE, 4)
    ear.clock.advance(ASK_PAUSE)
    assert not ear.peers.should_ask(peer)


def test_only_a_gap_after_a_received_packet_is_a_missed_packet() -> None:
    ear = Ear()
    peer = ear.hear(PacketKind.NEWS, 7)
    assert peer is not None
    assert (peer.has_gap, peer.has_missed) == (True, False)
    ear.hear(PacketKind.STATE, 7)
    ear.hear(PacketKind.NEWS, 9)
    assert (peer.has_gap, peer.has_missed) == (True, True)


class Silence:
    """A transport that sends nothing."""

    def publish(self, packet: Packet) -> None: ...

    async def end(self) -> None: ...


@pytest.mark.parametrize(("host", "counted"), [(OWN, []), (ONE, [True])])
def test_missed_packets_are_counted_only_for_other_hosts(host: bytes, counted: list[bool]) -> None:
    """The link of a worker counts the packets that it drops."""
    replica, found = bare_replica(peer_id(OWN, 1), ManualClock()), list[bool]()
    replica.use(Silence())
    replica.missed = lambda: found.append(True)
    for number in (1, 3):
        replica.received(packet(PacketKind.NEWS, peer_id(host, 2), number, b""))
    assert found == counted


def test_a_goodbye_of_an_unknown_host_adds_no_member() -> None:
    ear = Ear()
    assert ear.hear(PacketKind.BYE, 1) is None
    assert not ear.peers.hosts


@given(numbers=st.lists(st.integers(1, 30), max_size=40))
def test_no_packet_is_applied_twice_and_no_gap_is_missed(numbers: list[int]) -> None:
    ear = Ear()
    peer = ear.known(1)
    taken = [1]
    for number in numbers:
        if ear.hear(PacketKind.NEWS, number) is not None:
            taken.append(number)
    assert taken == sorted(set(taken))
    assert peer.has_gap is (taken != list(range(1, len(taken) + 1)))
