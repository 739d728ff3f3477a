"""Assumed spending of unreachable hosts, and drains by operators and the autoscaler."""

from __future__ import annotations

from collections.abc import Collection

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.membership import AssumedSpending
from proxy.cluster.messages import InvalidMessage, RecordKind, record, records
from proxy.cluster.shared import DRAINING, SharedDrains
from proxy.core.endpoint import Endpoint
from proxy.fleet.store import AUTOSCALER, OPERATOR

WHO = ["key", "chat", "standard"]
SPENT = [1.0, 20.0, 15.0, 5.0, 20.0]


class Assumed:
    def __init__(self, others: int) -> None:
        self.received: list[tuple[list[str], int, list[float]]] = []
        self.absence = AssumedSpending(self._hear)
        self.absence.start(others)

    def _hear(self, batch: bytes) -> None:
        for kind, body in records(batch):
            assert kind is RecordKind.SPENT
            self.received += orjson.loads(body)

    def spend(self, member: int, running: int, amounts: list[float] = SPENT) -> None:
        other = record(RecordKind.SESSIONS, b"[]")
        self.absence.add(bytes([member]), other + record(RecordKind.SPENT, orjson.dumps([(WHO, running, amounts)])))


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
        self.drained_by: set[str] = set()
        self.published: list[bytes] = []
        self.shared = SharedDrains(self._set, lambda kind, body: self.published.append(body))

    def hear(self, other: Operated) -> None:
        """What the other sends to who joins."""
        for kind, body in other.shared.current():
            self.shared.receive(1, kind, body)

    @property
    def drains(self) -> bool:
        return bool(self.drained_by)

    def _set(self, name: str, drained_by: Collection[str]) -> None:
        if not self.has_pod:
            raise KeyError(name)
        self.drained_by = set(drained_by)
        self.shared.turned(self.pod, drained_by)

    def operate(self, drains: bool, who: str = OPERATOR) -> None:
        self._set("a", self.drained_by | {who} if drains else self.drained_by - {who})


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(DRAINING), st.booleans()), max_size=20))
def test_all_agree_after_all_updates(steps: list[tuple[int, bool, str, bool]]) -> None:
    """Some of it reaches the others at once, the rest is made good by a snapshot."""
    hosts = [Operated() for _ in range(3)]
    for index, drains, who, reaches in steps:
        host = hosts[index]
        host.published.clear()
        host.operate(drains, who)
        for other in hosts:
            for body in host.published if reaches and other is not host else ():
                other.shared.receive(1, RecordKind.DRAINS, body)
    for host in hosts:
        for other in hosts:
            other.hear(host)
    assert all(host.drained_by == hosts[0].drained_by for host in hosts)
    if all(reaches for *_, reaches in steps):
        last = {who: drains for _, drains, who, _ in steps}
        assert hosts[0].drained_by == {who for who, drains in last.items() if drains}


def test_a_drain_by_an_operator_outlasts_drains_of_the_autoscaler_on_a_host_that_was_cut_off() -> None:
    one, two = Operated(), Operated()
    one.operate(True)
    for _ in range(3):
        two.operate(True, AUTOSCALER)
        two.operate(False, AUTOSCALER)
    one.hear(two)
    two.hear(one)
    assert one.drained_by == two.drained_by == {OPERATOR}


def test_received_updates_are_not_forwarded() -> None:
    one, two = Operated(), Operated()
    one.operate(True)
    two.shared.receive(1, RecordKind.DRAINS, one.published[0])
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
    two.drained_by = set()
    two.shared.added(Endpoint("a"))
    two.hear(one)
    assert not two.drains


@pytest.mark.parametrize("body", [b"{]", b"[1]", b'[["a"]]', b'[["a", "b", true, 1]]', b'[["a", "b", "c"]]'])
def test_malformed_drains_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessage):
        Operated().shared.receive(1, RecordKind.DRAINS, body)
