"""What another process sends, however much and however wrong, costs a bounded number of log lines, tasks and bytes."""

from __future__ import annotations

import asyncio
import logging
import random

import orjson
import pytest

from proxy.auth import limits
from proxy.auth.limits import RateLimiter
from proxy.auth.settings import Limits
from proxy.cluster import membership, messages, prefixes, shared
from proxy.cluster.deployment import Deployment
from proxy.cluster.membership import Peers, peer_id
from proxy.cluster.messages import (
    BROKER,
    FIRST_NUMBER,
    InvalidMessage,
    Packet,
    PacketKind,
    RecordKind,
    message,
    packet,
    question,
    record,
)
from proxy.cluster.prefixes import IndexChanges, SharedIndex
from proxy.cluster.replica import LEASE, Replica, new_id
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.shared import PeerLoads, SharedDrains, SharedLimits, SharedQueue, pod_number
from proxy.cluster.transport import Broker, Transport
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.flowcontrol import capacity
from proxy.flowcontrol.capacity import SharedCaps
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.replicas import bare_replica

POD = Endpoint("a")


class Sent(Transport):
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []

    def publish(self, packet: Packet) -> None:
        self.packets.append(packet)

    async def end(self) -> None:
        return


def replica(number: int = 1) -> Replica:
    made = bare_replica(new_id(number), ManualClock(), endpoints=lambda: [POD])
    made.use(Sent())
    return made


def news(sender: bytes, number: int, body: bytes) -> Packet:
    return packet(PacketKind.NEWS, sender, number, body)


def _deployment(clock: ManualClock) -> Deployment:
    return Deployment(ReplicaSettings(store="redis://x"), clock, random.Random(1), Catalogue("test"), replica(), str)


def test_a_flood_of_garbled_messages_of_a_peer_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    it, sender = replica(), peer_id(b"other", 5)
    for number in range(1, 2001, 2):
        it.received(news(sender, number, b"\1"))
        it.received(news(sender, number + 1, record(RecordKind.LOAD, b"\1")))
    assert caplog.text.count(f"dropped a packet of process {sender.hex()} of another host") == 1
    assert (it.garbled.value, it.garbled_of_hosts.value) == (0, 2000)


def test_an_error_in_the_log_is_short_whatever_the_message_was() -> None:
    assert len(messages.summary(ValueError("x" * 1_000_000))) < 300


def test_a_flood_of_garbled_messages_of_a_worker_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = replica(BROKER)
    broker = Broker(supervisor, lambda _: None)
    worker = peer_id(broker.host, 5)
    for _ in range(1000):
        broker._pass_on(packet(PacketKind.DIRECT, worker, 0, b"\1", supervisor.id), 5)
    assert caplog.text.count(f"dropped a packet of process {worker.hex()} of this host") == 1
    assert (supervisor.garbled.value, supervisor.garbled_of_hosts.value) == (1000, 0)


def test_a_flood_of_forged_packets_of_hosts_is_bounded_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MOST_HOSTS", 10)
    clock = ManualClock()
    deployment = _deployment(clock)
    facts = orjson.dumps({"config": "", "name": "x"})
    with caplog.at_level(logging.ERROR):
        for number in range(1000):
            sender = number.to_bytes(5, "big") + bytes(3)
            deployment._received(message(packet(PacketKind.BEAT, sender, 1, facts).packed))
            deployment._received(message(packet(PacketKind.BEAT, b"x" * 8, number, b"{}").packed))
            deployment._received(message(b"\3"))
    assert len(deployment._replica.peers.hosts) <= 10 + 1
    assert caplog.text.count("dropped a packet of another host") == 1
    assert caplog.text.count("dropped a packet of process") == 1
    clock.advance(60.0)
    deployment._received(message(b"\3"))
    assert caplog.text.count("dropped a packet of another host") == 2


def test_a_host_has_a_bounded_number_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MOST_PEERS", 10)
    peers = Peers(b"own-h", ManualClock(), 5.0, lambda _: None)
    found = [peers.receive(packet(PacketKind.HELLO, peer_id(b"other", member), 1, b"")) for member in range(10)]
    with pytest.raises(InvalidMessage, match="10 processes"):
        peers.receive(packet(PacketKind.HELLO, peer_id(b"other", 11), 1, b""))
    assert found[3] is not None
    peers.forget(found[3])
    assert peers.receive(packet(PacketKind.HELLO, peer_id(b"other", 5000), 1, b"")) is not None


@pytest.mark.parametrize("facts", [{"name": "x" * 2000}, {"config": "x" * 2000}])
def test_facts_of_a_host_have_a_bounded_size(facts: dict[str, object]) -> None:
    with pytest.raises(InvalidMessage):
        messages.facts(orjson.dumps({"config": "", "name": "x", **facts}))


async def test_however_often_a_peer_asks_for_a_snapshot_one_task_sends_it() -> None:
    it, sent = replica(), Sent()
    it.use(sent)
    peer = peer_id(b"other", 7)
    for _ in range(1000):
        it.received(packet(PacketKind.ASK, peer, 0, question(peer, 1.0), it.id))
    assert len(it._tasks._tasks) == 1
    while it._tasks:
        await asyncio.sleep(0)
    assert len(sent.packets) == 2, "the one that was running, and one for all that asked meanwhile"
    it.send_state(peer, 0.0)
    while it._tasks:
        await asyncio.sleep(0)
    assert len(sent.packets) == 3


async def test_a_peer_asks_for_its_own_host_only() -> None:
    it, peer = replica(), peer_id(b"other", 7)
    for to in (peer_id(b"third", 7), bytes(8), it.id):
        it.received(packet(PacketKind.ASK, peer, 0, question(to, 1.0), it.id))
    assert not it._tasks
    assert it.garbled_of_hosts.value == 3


def test_loads_on_unknown_pods_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_UNKNOWN", 10)
    applied: list[int] = []
    known = {pod_number("a"): POD}
    loads = PeerLoads(known.get, lambda endpoint, requests, *_: applied.append(requests))
    for number in range(1000):
        loads.receive(5, RecordKind.LOAD, _load(number))
    loads.receive(5, RecordKind.LOAD, _load(pod_number("a")))
    assert len(loads._of) == 11
    assert applied == [1]


def _load(pod: int) -> bytes:
    return shared._COUNT.pack(1) + messages.longs([pod]) + messages.words([1, 1, 1])


def test_drains_of_unknown_pods_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_UNKNOWN", 10)
    drains = SharedDrains(lambda *_: None, lambda *_: None)
    for number in range(1000):
        drains.receive(5, RecordKind.DRAINS, orjson.dumps([[f"p{number}", "operator", 1]]))
    assert len(drains.known) == 10
    drains.receive(5, RecordKind.DRAINS, orjson.dumps([["p0", "operator", 2]]))
    assert drains.known["p0", "operator"] == 2


def test_drains_of_removed_pods_are_forgotten_for_drains_of_other_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_UNKNOWN", 20)
    drained: list[str] = []
    here = SharedDrains(lambda *_: None, lambda kind, body: there.receive(5, kind, body))
    there = SharedDrains(lambda name, who: drained.append(name), lambda *_: None)
    for number in range(1000):
        pod = Endpoint(f"p{number}")
        here.turned(pod, ["autoscaler"])
        for drains in (here, there):
            drains.removed(pod)
            assert len(drains.known) <= 20
    assert drained == [f"p{number}" for number in range(1000)]


def test_meters_of_names_that_only_peers_know_are_made_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_OF_PEERS", 10)
    limiter = RateLimiter({"own": Limits(tokens_per_day=100)}, {}, ManualClock(), lambda *_: None)
    it = SharedLimits(limiter, lambda *_: None, LEASE)
    for number in range(1000):
        it.receive(5, RecordKind.USED, orjson.dumps([[["key", f"k{number}", "own"], 0, [0, 0, 0, 0, 50]]]))
        it.receive(5, RecordKind.SPENT, orjson.dumps([[["key", f"l{number}", "own"], 1, [0, 0, 0, 0, 50]]]))
    assert len(limiter.known()) == 10
    it.receive(5, RecordKind.USED, orjson.dumps([[["key", "k0", "own"], 0, [0, 0, 0, 0, 70]]]))
    assert {who[1]: used[4] for who, _, used in limiter.known()}["k0"] == 70


def test_a_peer_lends_a_bounded_number_of_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MOST_CAPS", 10)
    monkeypatch.setattr(shared, "MOST_CAPS", 10)
    shared_caps = SharedCaps(2, lambda *_: None, name="me")
    queue = SharedQueue("default", shared_caps, lambda: None)
    for number in range(1000):
        queue.receive(
            5, RecordKind.WAITING, SharedQueue.packed("default", "you", None, 0.0, {"me": {f"cap{number}": 1}}, ())
        )
    assert len(shared_caps._got[5]) == 10
    with pytest.raises(InvalidMessage):
        queue.receive(
            5,
            RecordKind.WAITING,
            SharedQueue.packed("default", "you", None, 0.0, {}, [str(each) for each in range(11)]),
        )


def test_a_peer_has_a_bounded_number_of_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_RESERVED", 10)
    index = SharedIndex(ManualClock(), 1 << 24, tag=1, touch=lambda: None, find={pod_number("a"): POD}.get)

    def moves(number: int) -> bytes:
        return IndexChanges([], [2 * number, 0, 1], [messages.longs([number])], [(pod_number("a"), 100)]).packed(1)

    for number in range(1, 11):
        index.receive(5, RecordKind.MOVES, moves(number))
    with pytest.raises(InvalidMessage, match="reservations"):
        index.receive(5, RecordKind.MOVES, moves(11))
    assert len(index._of_peers[5]) == 10
    index.vanished(5)
    index.receive(5, RecordKind.MOVES, moves(1))


def test_a_member_of_a_forged_packet_is_refused_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MOST_PEERS", 10)
    deployment = _deployment(ManualClock())
    load = record(RecordKind.LOAD, _load(pod_number("a")))
    for member in range(1000):
        deployment._received(message(news(peer_id(b"other", member), 1, load).packed))
    peers = deployment._replica.peers._peers.values()
    assert len(peers) == 10
    assert all(peer.number >= FIRST_NUMBER for peer in peers)
