"""Assumed spending of unreachable hosts, and drains by operators."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.membership import AssumedSpending
from proxy.cluster.messages import FrameKind, InvalidMessage, record, records
from proxy.cluster.shared import SharedDrains
from proxy.core.endpoint import Endpoint

WHO = ["key", "chat", "standard"]
SPENT = [1.0, 20.0, 15.0, 5.0, 20.0]


class Assumed:
    def __init__(self, others: int) -> None:
        self.received: list[tuple[list[str], int, list[float]]] = []
        self.absence = AssumedSpending(self._hear)
        self.absence.start(others)

    def _hear(self, batch: bytes) -> None:
        for kind, body in records(batch):
            assert kind is FrameKind.SPENT
            self.received += orjson.loads(body)

    def spend(self, member: int, running: int, amounts: list[float] = SPENT) -> None:
        other = record(FrameKind.SESSIONS, b"[]")
        self.absence.add(bytes([member]), other + record(FrameKind.SPENT, orjson.dumps([(WHO, running, amounts)])))


def test_each_other_host_is_assumed_to_spend_as_much_as_this_host() -> None:
    it = Assumed(3)
    it.spend(1, running=2)
    it.spend(2, running=1)
    tripled = [3 * amount for amount in SPENT]
    assert [tuple(each) for each in it.received] == [(WHO, 6, tripled), (WHO, 9, tripled)]


def test_without_other_hosts_nothing_is_assumed() -> None:
    alone, back = Assumed(0), Assumed(3)
    back.absence.end()
    for it in (alone, back):
        it.spend(1, running=2)
        assert not it.received


def test_no_more_is_returned_for_other_hosts_than_was_assumed_for_them() -> None:
    it = Assumed(9)
    returned = [-amount for amount in SPENT]
    it.spend(1, running=0, amounts=returned)
    it.spend(1, running=1)
    it.spend(1, running=0, amounts=[2 * amount for amount in returned])
    total = [sum(amounts) for amounts in zip(*(amounts for _, _, amounts in it.received), strict=True)]
    assert total == [0.0] * len(SPENT)


def test_a_pod_that_becomes_several_ranks_stays_drained() -> None:
    one, two = Operated(), Operated()
    one.operate(True)
    one.shared.has_pod = lambda name: True
    one.shared.removed(one.pod)
    two.hear(one)
    assert two.drains


class Operated:
    """A host with one pod, and its published messages."""

    def __init__(self, has_pod: bool = True) -> None:
        self.pod = Endpoint("a")
        self.has_pod = has_pod
        self.drains = False
        self.published: list[bytes] = []
        self.shared = SharedDrains(self._set, lambda kind, body: self.published.append(body))

    def hear(self, other: Operated) -> None:
        """What the other sends to who joins."""
        for kind, body in other.shared.in_flight():
            self.shared.receive(1, kind, body)

    def _set(self, name: str, drains: bool) -> None:
        if not self.has_pod:
            raise KeyError(name)
        self.drains = drains
        self.shared.turned(self.pod, drains)

    def operate(self, drains: bool) -> None:
        self.drains = drains
        self.shared.turned(self.pod, drains)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=20))
def test_all_agree_after_all_updates(steps: list[tuple[int, bool, bool]]) -> None:
    """Some of it reaches the others at once, the rest is made good by a snapshot."""
    hosts = [Operated() for _ in range(3)]
    for index, drains, reaches in steps:
        host = hosts[index]
        host.published.clear()
        host.operate(drains)
        for other in hosts:
            for body in host.published if reaches and other is not host else ():
                other.shared.receive(1, FrameKind.DRAINS, body)
    for host in hosts:
        for other in hosts:
            other.hear(host)
    assert len({host.drains for host in hosts}) == 1
    last = [(index, reaches) for index, _, reaches in steps]
    if last and all(reaches for _, reaches in last):
        assert hosts[0].drains is steps[-1][1]


def test_received_updates_are_not_forwarded() -> None:
    one, two = Operated(), Operated()
    one.operate(True)
    two.shared.receive(1, FrameKind.DRAINS, one.published[0])
    assert two.drains
    assert not two.published


def test_a_drain_applies_to_a_pod_that_appears_later_but_not_to_the_next_of_its_name() -> None:
    one, two = Operated(), Operated(has_pod=False)
    one.operate(True)
    two.hear(one)
    two.has_pod = True
    two.shared.added(two.pod)
    assert two.drains
    two.shared.removed(two.pod)
    two.drains = False
    two.shared.added(Endpoint("a"))
    two.hear(one)
    assert not two.drains


@pytest.mark.parametrize("body", [b"{]", b"[1]", b'[["a"]]', b'[["a", "b", true]]'])
def test_malformed_drains_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessage):
        Operated().shared.receive(1, FrameKind.DRAINS, body)
