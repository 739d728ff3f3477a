"""Loads in absolute numbers."""

from __future__ import annotations

import pytest

from proxy.cluster.messages import FIRST_NUMBER, MOST, InvalidMessage, RecordKind, records
from proxy.cluster.shared import LONG_PROMPT, OwnLoads, PeerLoads, PodNumbers
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics, update
from proxy.core.ports import ManualClock
from proxy.fleet.ledger import Ledger


class Process:
    """One process's picture of the same pods."""

    def __init__(self, *names: str) -> None:
        self.pods: dict[str, Endpoint] = {}
        self.roster = PodNumbers()
        self.ledger = Ledger(ManualClock())
        self.touched = 0
        self.own = OwnLoads(self.touch, find=self.roster.get)
        self.peers = PeerLoads(self.roster.get, self.ledger.elsewhere)
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        pod = self.pods[name] = Endpoint(name)
        self.roster.added(pod)
        self.peers.added(pod)

    def touch(self) -> None:
        self.touched += 1

    def work(self, name: str, requests: int, tokens: int) -> None:
        """As the ledger would count it."""
        self.pods[name].charge(requests, tokens)
        if requests > 0:
            self.own.dispatched(self.pods[name], tokens + 1)
        else:
            self.own.eased(self.pods[name])


def body_of(raw: bytes) -> bytes:
    ((kind, body),) = records(raw)
    assert kind is RecordKind.LOAD
    return body


def load(process: Process, name: str) -> tuple[int, int]:
    return process.pods[name].load.requests, process.pods[name].load.tokens


def test_requests_of_a_peer_are_part_of_load_and_view() -> None:
    here, there = Process("a"), Process("a")
    here.pods["a"].publish(Metrics(running=5, freshness=Freshness.FRESH), 0)
    there.work("a", 3, 100)
    here.work("a", 1, 10)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert load(here, "a") == (4, 110)
    assert here.pods["a"].view.running == 9
    there.work("a", -2, -100)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert load(here, "a") == (2, 10)
    assert here.pods["a"].view.running == 7


def test_requests_on_this_host_are_the_requests_of_its_workers() -> None:
    supervisor, worker, other_host = Process("a"), Process("a"), Process("a")
    worker.work("a", 2, 20)
    other_host.work("a", 3, 30)
    supervisor.peers.receive(1, RecordKind.LOAD, body_of(worker.own.collect_changes()))
    supervisor.peers.receive(FIRST_NUMBER, RecordKind.LOAD, body_of(other_host.own.collect_changes()))
    assert load(supervisor, "a") == (5, 50)
    assert supervisor.peers.on_this_host == 2
    supervisor.peers.vanished(1)
    assert supervisor.peers.on_this_host == 0


def test_a_repeated_message_counts_once() -> None:
    here, there = Process("a"), Process("a")
    there.work("a", 3, 100)
    body = body_of(there.own.collect_changes())
    here.peers.receive(7, RecordKind.LOAD, body)
    here.peers.receive(7, RecordKind.LOAD, body)
    assert load(here, "a") == (3, 100)


def test_loads_of_peers_are_not_published_again() -> None:
    here, there = Process("a"), Process("a")
    there.work("a", 3, 100)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert here.own.collect_changes() == b""
    assert OwnLoads.all(here.pods.values()) == b""
    here.work("a", 1, 1)
    third = Process("a")
    third.peers.receive(1, RecordKind.LOAD, OwnLoads.all(here.pods.values()))
    assert load(third, "a") == (1, 1)


def test_a_dispatch_of_a_long_prompt_is_published_soon() -> None:
    calls: list[str] = []
    own = OwnLoads(lambda: calls.append("touch"), lambda: calls.append("later"), lambda: calls.append("soon"))
    pod = Endpoint("a")
    own.dispatched(pod, LONG_PROMPT - 1)
    own.dispatched(pod, 1)
    own.dispatched(pod, LONG_PROMPT)
    own.eased(pod)
    assert calls == ["touch", "soon"]


def test_a_removed_peer_takes_its_load_with_it() -> None:
    here, one, other = Process("a", "b"), Process("a", "b"), Process("a", "b")
    one.work("a", 3, 100)
    other.work("a", 2, 50)
    other.work("b", 1, 5)
    here.peers.receive(1, RecordKind.LOAD, body_of(one.own.collect_changes()))
    here.peers.receive(2, RecordKind.LOAD, body_of(other.own.collect_changes()))
    here.peers.vanished(2)
    assert load(here, "a") == (3, 100)
    assert load(here, "b") == (0, 0)
    here.peers.vanished(1)
    assert load(here, "a") == (0, 0)


def test_the_last_requests_of_a_replaced_pod_do_not_hide_the_load_of_its_successor() -> None:
    here, there = Process("a"), Process("a")
    there.work("a", 3, 100)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    old = there.pods["a"]
    there.roster.removed(old)
    update(old, state=EndpointState.GONE)
    there.add("a")
    there.work("a", 2, 50)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    old.charge(-3, -100)
    there.own.eased(old)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert load(here, "a") == (2, 50)


def test_the_last_requests_of_a_removed_pod_end_its_load() -> None:
    here, there = Process("a"), Process("a")
    there.work("a", 3, 100)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    there.roster.removed(there.pods["a"])
    update(there.pods["a"], state=EndpointState.GONE)
    there.work("a", -3, -100)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert load(here, "a") == (0, 0)


def test_a_pod_that_appears_later_gets_its_load() -> None:
    here, there = Process(), Process("a")
    there.work("a", 3, 100)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    here.add("a")
    assert load(here, "a") == (3, 100)


def test_a_pod_with_load_of_peers_loses_ties() -> None:
    here, there = Process("a", "b"), Process("a", "b")
    there.work("a", 1, 1000)
    here.peers.receive(7, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert here.pods["a"].load.recent > here.pods["b"].load.recent


def test_many_changes_are_one_message() -> None:
    here = Process("a")
    for _ in range(50):
        here.work("a", 1, 10)
    assert here.touched == 1
    assert len(here.own.collect_changes()) < 50


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_garbage_changes_nothing(cut: int) -> None:
    here, there = Process("a", "b"), Process("a", "b")
    there.work("a", 1, 10)
    there.work("b", 1, 10)
    body = body_of(there.own.collect_changes())
    with pytest.raises(InvalidMessage):
        here.peers.receive(7, RecordKind.LOAD, body[:-cut])
    assert load(here, "a") == (0, 0)


def test_only_added_load_is_urgent() -> None:
    published: list[str] = []
    own, pod = OwnLoads(lambda: published.append("soon"), lambda: published.append("later")), Endpoint("a")
    own.eased(pod)
    own.eased(pod)
    own.dispatched(pod, 5)
    own.dispatched(pod, 5)
    own.eased(pod)
    assert published == ["later", "soon"]
    own.collect_changes()
    own.eased(pod)
    assert published == ["later", "soon", "later"]


def test_added_work_is_published_once_and_saturates() -> None:
    here, there = Process("a", "b"), Process("a", "b")
    received: list[tuple[str, int, int, int]] = []
    here.peers = PeerLoads(here.roster.get, lambda pod, *numbers: received.append((pod.name, *numbers)))
    there.pods["a"].charge(1, 10)
    there.own.dispatched(there.pods["a"], 11)
    there.own.dispatched(there.pods["a"], 5)
    there.own.eased(there.pods["b"])
    here.peers.receive(1, RecordKind.LOAD, body_of(there.own.collect_changes()))
    there.pods["a"].charge(0, 1 << 40)
    there.own.eased(there.pods["a"])
    here.peers.receive(1, RecordKind.LOAD, body_of(there.own.collect_changes()))
    assert received == [("a", 1, 10, 16), ("b", 0, 0, 0), ("a", 1, MOST, 0)]
