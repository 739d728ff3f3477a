"""Which other hosts there are, and what of them was missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.membership import ASK_PAUSE, Host, Peers
from proxy.cluster.messages import FIRST_NUMBER, Packet, Say
from proxy.core.ports import ManualClock

LEASE = 5.0
ONE, TWO = b"host-one", b"host-two"


class Ear:
    """Hears packets, and keeps who is gone."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gone: list[int] = []
        self.peers = Peers(self.clock, LEASE, self.gone.append)

    def hear(self, say: Say, number: int, host: bytes = ONE) -> Host | None:
        return self.peers.hear(Packet(say, host, number, b""))

    def known(self, number: int, host: bytes = ONE) -> Host:
        found = self.hear(Say.HELLO, number, host)
        assert found is not None
        return found


def test_a_host_silent_for_a_lease_is_removed_with_all_members() -> None:
    ear = Ear()
    host = ear.known(1)
    numbers = [ear.peers.number(host, member) for member in (0, 1, 2)]
    ear.clock.advance(LEASE - 0.1)
    ear.hear(Say.BEAT, 2)
    ear.clock.advance(LEASE - 0.1)
    ear.peers.sweep()
    assert not ear.gone
    ear.clock.advance(0.2)
    ear.peers.sweep()
    assert ear.gone == numbers
    assert not len(ear.peers)
    assert ear.peers.host_of(numbers[0]) is None


def test_numbers_of_members_are_never_reused() -> None:
    ear = Ear()
    one, two = ear.known(1), ear.known(1, TWO)
    numbers = {ear.peers.number(one, 0), ear.peers.number(one, 7), ear.peers.number(two, 0)}
    assert len(numbers) == 3
    assert min(numbers) >= FIRST_NUMBER
    assert ear.peers.number(one, 7) in numbers
    ear.peers.forget(one)
    assert ear.peers.number(ear.known(2), 7) not in numbers


def test_members_that_a_host_no_longer_lists_are_removed() -> None:
    ear = Ear()
    host = ear.known(1)
    _, first, second = (ear.peers.number(host, member) for member in (0, 1, 2))
    ear.peers.keep(host, [2, 3])
    assert ear.gone == [first]
    assert ear.peers.host_of(second) is host


def test_overtaken_packets_are_ignored() -> None:
    ear = Ear()
    ear.known(5)
    assert ear.hear(Say.NEWS, 4) is None
    assert ear.hear(Say.NEWS, 5) is None
    assert ear.hear(Say.ANSWER, 4) is None
    assert ear.hear(Say.ANSWER, 5) is not None
    assert ear.hear(Say.NEWS, 6) is not None


def test_a_missed_packet_is_requested_periodically_until_a_response() -> None:
    ear = Ear()
    host = ear.known(1)
    ear.hear(Say.NEWS, 2)
    assert not ear.peers.should_ask(host)
    ear.hear(Say.NEWS, 4)
    assert ear.peers.should_ask(host)
    assert not ear.peers.should_ask(host)
    ear.clock.advance(ASK_PAUSE)
    assert ear.peers.should_ask(host)
    ear.hear(Say.ANSWER, 4)
    ear.clock.advance(ASK_PAUSE)
    assert not ear.peers.should_ask(host)


def test_a_goodbye_of_an_unknown_host_adds_no_member() -> None:
    ear = Ear()
    assert ear.hear(Say.BYE, 1) is None
    assert not len(ear.peers)


@given(numbers=st.lists(st.integers(1, 30), max_size=40))
def test_no_packet_is_applied_twice_and_no_gap_is_missed(numbers: list[int]) -> None:
    ear = Ear()
    host = ear.known(1)
    taken = [1]
    for number in numbers:
        if ear.hear(Say.NEWS, number) is not None:
            taken.append(number)
    assert taken == sorted(set(taken))
    assert host.has_gap is (taken != list(range(1, len(taken) + 1)))
