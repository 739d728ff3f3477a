"""Replicas around a hub, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from proxy.auth.limits import RateLimiter
from proxy.auth.settings import Limits
from proxy.cluster.membership import peer_id
from proxy.cluster.messages import BROKER, PacketKind, RecordKind, packet, record
from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.replica import ALL, LEASE, Replica, new_id
from proxy.cluster.shared import SharedBreakers, SharedEjections, SharedLimits, SharedSessions, SharedSpeeds
from proxy.cluster.transport import Broker, Link
from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, update
from proxy.core.ports import IDENTITY, Clock, Identity, SystemClock
from proxy.core.request import InferenceRequest
from proxy.fleet.bindings import Bindings
from proxy.fleet.ledger import Ledger
from proxy.latency.rates import FleetModel
from proxy.prefix.hashing import Chain
from proxy.reliability.breaker import Breakers
from proxy.telemetry.metrics import Catalogue
from tests.helpers.waiting import PATIENCE, until

ROLL = b'["a"]'


class Member:
    """A process on the bus, with one pod."""

    def __init__(self, id: bytes | None = None, clock: Clock | None = None, lease: float = 5.0) -> None:
        self.pod = Endpoint("a")
        self.ledger = Ledger(SystemClock())
        self.received: list[tuple[RecordKind, bytes]] = []
        self.own_ejections: dict[str, list[str]] = {}
        self.peer_ejections: dict[int, Mapping[str, Sequence[str]]] = {}
        """The ejections of other processes, by their number."""
        self.breakers: list[tuple[str, bool]] = []
        self.tried: list[str] = []
        self.lost = asyncio.Event()
        self.replica = Replica(
            id or new_id(),
            clock or SystemClock(),
            endpoints=lambda: [self.pod],
            apply=self.ledger.elsewhere,
            receive=lambda peer, kind, body: self.received.append((kind, body)),
            catalogue=Catalogue("test"),
            lost=self.lost.set,
            lease=lease,
        )
        self.replica.added(self.pod)
        self.index = SharedIndex(
            SystemClock(), 1 << 24, tag=1, touch=self.replica.touch_later, find=self.replica.roster.get
        )
        publish = self.replica.publish
        self.ejections = SharedEjections(
            lambda: self.own_ejections, self.peer_ejections.__setitem__, self.replica.publish_local
        )
        self.speeds = FleetModel()
        self.bindings = Bindings(SystemClock())
        responses = SharedSessions(
            self.bindings.table, SystemClock(), name="responses", publish=publish, find=lambda name: self.pod
        )
        self.shared_breakers = SharedBreakers(
            cast(Breakers, self), lambda name: self.pod, publish, lambda: self.replica.place
        )
        self.replica.state.put(
            ejections=[self.ejections],
            bindings=[responses],
            breakers=[self.shared_breakers],
            indexes=[self.index],
            speeds=[SharedSpeeds(self.speeds, "pool/latency", lambda name: self.pod)],
        )

    @property
    def knows_response(self) -> bool:
        return self.bindings.table.get("resp-1", SystemClock().now()) is self.pod

    def hear(self, endpoint: Endpoint, is_open: bool) -> None:
        """As breakers do, also below."""
        self.breakers.append((endpoint.name, is_open))

    def hold_off(self, endpoint: Endpoint) -> None:
        self.tried.append(endpoint.name)

    def add_limits(self) -> None:
        """As a reload does."""
        self.limiter = RateLimiter({"own": Limits(requests_per_minute=10)}, {}, SystemClock(), lambda *_: None)
        self.replica.share([SharedLimits(self.limiter, self.replica.publish, LEASE)])

    async def charge(self) -> None:
        """Charge a request to a key."""
        request = InferenceRequest("r", "/", "m")
        request.state.write(IDENTITY, Identity("alice", "acme", limits="own"))
        async with self.limiter.admit(request):
            self.limiter.attempt_started(attempt := Attempt(request, Decision(self.pod), self.pod, 0, 0.0))
            attempt.sent_at = 0.0

    @property
    def spent(self) -> float:
        """The requests of all processes, as this one knows them."""
        return round(sum(used[0] for _, _, used in self.limiter.known()))

    def dispatch(self, requests: int) -> None:
        self.pod.charge(requests, 0)
        self.replica.own_loads.dispatched(self.pod, 1)

    def reserve(self, chain: Chain) -> None:
        self.index.reserve((chain,), self.pod, 100_000)

    def remember(self, chain: Chain) -> None:
        self.index.confirm(self.index.reserve((chain,), self.pod, 100_000))

    def depth(self, chain: Chain) -> int:
        return self.index.match(chain).get(self.pod, 0)


class Bus:
    """A broker, the records that its supervisor receives, and raw ends of links without a replica."""

    def __init__(self) -> None:
        self.received: list[tuple[int, RecordKind, bytes]] = []
        self.vanished: list[int] = []
        self.members: dict[int, Member] = {}
        self.replica = Replica(
            new_id(BROKER),
            SystemClock(),
            endpoints=tuple,
            apply=lambda *_: None,
            receive=lambda worker, kind, body: self.received.append((worker, kind, body)),
            catalogue=Catalogue("test"),
            snapshot=lambda: [(RecordKind.ROLL, ROLL)],
        )
        self.breakers = SharedBreakers(cast(Breakers, self), lambda name: None, self.replica.publish)
        self.broker = Broker(self.replica, self.vanished.append)

    async def join(self, number: int) -> Member:
        member = self.members[number] = Member(peer_id(self.broker.host, number))
        ours, theirs = socket.socketpair()
        await self.broker.attach(number, ours)
        await member.replica.connect(theirs)
        await until(lambda: (RecordKind.ROLL, ROLL) in member.received)
        return member

    async def join_raw(self, number: int) -> socket.socket:
        """One that reads only when the test does."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        await self.broker.attach(number, ours)
        return theirs


@asynccontextmanager
async def bus() -> AsyncIterator[Bus]:
    found = Bus()
    try:
        yield found
    finally:
        for member in found.members.values():
            await member.replica.close()
        await found.broker.end()
        await found.replica.close()
        await asyncio.sleep(0)


async def test_changes_of_one_worker_reach_all_others_and_the_broker() -> None:
    async with bus() as it:
        one, two, three = [await it.join(number) for number in (1, 2, 3)]
        one.dispatch(2)
        one.remember([1, 2, 3])
        one.bindings.bind("resp-1", one.pod)
        await until(lambda: all(each.pod.load.requests == 2 for each in (two, three)))
        await until(lambda: all(each.depth([1, 2, 3]) == 3 for each in (two, three)))
        await until(lambda: two.knows_response and three.knows_response)
        assert one.pod.load.remote_requests == 0
        assert RecordKind.SESSIONS in [kind for worker, kind, _ in it.received if worker == 1]


async def test_a_new_worker_gets_the_loads_and_index_of_the_others() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        one.dispatch(2)
        two.dispatch(3)
        one.remember([1, 2, 3])
        two.reserve([4, 5])
        one.bindings.bind("resp-1", one.pod)
        await until(lambda: two.depth([1, 2, 3]) == 3)
        late = await it.join(3)
        await until(lambda: late.pod.load.requests == 5)
        await until(lambda: late.depth([1, 2, 3]) == 3 and late.depth([4, 5]) == 2)
        await until(lambda: late.knows_response)


async def test_a_new_worker_gets_the_speeds_of_pods_that_another_has_observed() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        rates = two.speeds.rates_of(two.pod)
        for _ in range(20):
            rates.observe_prefill(0.3, 0.0, 1000.0, 0.0)
        late = await it.join(3)
        await until(lambda: late.speeds.has_learned)
        assert late.speeds.rates_of(late.pod).per_token == pytest.approx(rates.per_token, rel=0.05)
        assert not one.speeds.has_learned


async def test_a_worker_that_reloads_late_learns_what_the_others_have_spent() -> None:
    async with bus() as it:
        one, two, three = [await it.join(number) for number in (1, 2, 3)]
        for early in (one, two):
            early.add_limits()
            await early.charge()
        await until(lambda: one.spent == two.spent == 2)
        three.add_limits()
        await until(lambda: three.spent == 2)


async def test_a_vanished_worker_is_removed_at_once() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        one.dispatch(2)
        one.reserve([1, 2])
        await until(lambda: two.pod.load.requests == 2 and two.depth([1, 2]) == 2)
        await it.members.pop(1).replica.close()
        await until(lambda: two.pod.load.requests == 0 and two.depth([1, 2]) == 0)
        assert it.vanished == [1]


async def test_ejection_reasons_reach_all_and_new_workers_and_end_with_their_worker() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        one.own_ejections["a"] = ["ill"]
        one.ejections.changed()
        await until(lambda: two.peer_ejections.get(1) == {"a": ["ill"]})
        assert RecordKind.EJECTIONS in [kind for worker, kind, _ in it.received if worker == 1]
        late = await it.join(3)
        await until(lambda: late.peer_ejections.get(1) == {"a": ["ill"]})
        await it.members.pop(1).replica.close()
        await until(lambda: two.peer_ejections[1] == late.peer_ejections[1] == {})


async def test_a_breaker_change_reaches_all() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        one.shared_breakers.breaker_turned(one.pod, True)
        one.shared_breakers.breaker_turned(one.pod, False)
        await until(lambda: two.breakers == [("a", True), ("a", False)])
        assert [kind for _, kind, _ in it.received].count(RecordKind.BREAKER) == 2


async def test_a_breaker_does_not_turn_for_a_pod_of_the_same_name_at_another_address() -> None:
    async with bus() as it:
        one, two, three = [await it.join(number) for number in (1, 2, 3)]
        update(two.pod, url="http://10.0.0.2:8000")
        one.shared_breakers.breaker_turned(one.pod, True)
        one.shared_breakers.breaker_tried(one.pod)
        await until(lambda: three.tried == ["a"])
        one.shared_breakers.breaker_turned(two.pod, True)
        await until(lambda: two.breakers)
        assert (two.breakers, two.tried, three.breakers) == ([("a", True)], [], [("a", True)])


async def test_a_slow_reader_blocks_none_and_gets_the_whole_state_later() -> None:
    async with bus() as it:
        one, slow = await it.join(1), await it.join(2)
        transport = cast(Link, slow.replica._transport)._transport
        assert transport is not None
        transport.pause_reading()
        for _ in range(40):
            one.replica._batch.send(record(RecordKind.SESSIONS, b"[" + b" " * (1 << 20) + b"]"))
            await asyncio.sleep(0)
        one.dispatch(2)
        one.reserve([1, 2])
        await until(lambda: (1, RecordKind.MOVES) in [(worker, kind) for worker, kind, _ in it.received])
        await until(lambda: it.replica.dropped.value > 0)
        it.broker.publish(
            packet(PacketKind.DIRECT, it.replica.id, 0, record(RecordKind.METRICS, b"{}"), it.replica.all_of_host)
        )
        transport.resume_reading()
        await until(lambda: slow.pod.load.requests == 2 and slow.depth([1, 2]) == 2)
        await until(lambda: slow.received.count((RecordKind.ROLL, ROLL)) == 2)


def _read(sock: socket.socket, into: bytearray) -> bool:
    """Always true, so that it stands before the condition that it is read for."""
    while True:
        try:
            data = sock.recv(1 << 20)
        except BlockingIOError:
            return True
        into += data


def _snapshot_of(member: Member) -> bytes:
    return b"".join(record(kind, body) for kind, body in member.replica._current(None))


async def test_malformed_records_of_one_worker_harm_and_disconnect_no_other() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        one.replica._batch.send(b"\x11\xff\xff")
        one.replica._batch.send(record(RecordKind.LOAD, b"\xff" * 9))
        one.replica._batch.send(record(RecordKind.SESSIONS, b"{]"))
        one.replica._batch.send(record(RecordKind.SESSIONS, b"[1]"))
        one.dispatch(2)
        await until(lambda: two.pod.load.requests == 2)
        assert two.replica.garbled.value == 4
        assert it.replica.garbled.value == 2
        assert not two.lost.is_set()


async def test_a_malformed_stream_is_disconnected() -> None:
    async with bus() as it:
        raw = await it.join_raw(1)
        raw.send(b"\xff" * 64)
        await until(lambda: it.vanished == [1])
        raw.close()


async def test_a_worker_notices_that_the_broker_is_gone() -> None:
    async with bus() as it:
        one = await it.join(1)
        await it.broker.end()
        await asyncio.wait_for(one.lost.wait(), PATIENCE)
        one.dispatch(1)
        await asyncio.sleep(0.01)


async def test_the_last_messages_of_a_worker_arrive_before_its_end() -> None:
    async with bus() as it:
        await it.join(1)
        last = b"x" * 3_000_000
        replica = it.members.pop(1).replica
        replica.send_to_supervisor(RecordKind.FAREWELL, last)
        await replica.close()
        await until(lambda: it.vanished == [1])
        assert it.received[-1] == (1, RecordKind.FAREWELL, last)


async def test_a_worker_whose_messages_were_lost_publishes_everything_again() -> None:
    ours, theirs = socket.socketpair()
    member = Member()
    dropped = member.replica.dropped
    link = Link(lambda _: None, lambda: None, lambda: member.replica.send_state(None, ALL), dropped, 500_000)
    await link.open(ours)
    member.replica.use(link)
    theirs.setblocking(False)
    member.dispatch(2)
    for number in range(30):
        link.publish(packet(PacketKind.NEWS, member.replica.id, number, bytes(50_000)))
        await asyncio.sleep(0)
    got = bytearray()
    assert dropped.value > 0
    await until(lambda: _read(theirs, got) and got.endswith(_snapshot_of(member)))
    link.abort()
    await member.replica.close()
    theirs.close()


async def test_a_record_that_the_broker_cannot_use_costs_only_that_record() -> None:
    async with bus() as it:
        one, two = [await it.join(number) for number in (1, 2)]
        it.replica.state.put(breakers=[it.breakers])
        one.replica._batch.send(record(RecordKind.BREAKER, b"{]"))
        one.replica._batch.send(record(RecordKind.BREAKER, b'[["a"],1,"opened"]'))
        one.bindings.bind("resp-1", one.pod)
        await until(lambda: two.knows_response and any(kind is RecordKind.SESSIONS for _, kind, _ in it.received))
        assert it.replica.garbled.value == two.replica.garbled.value == 2
        assert list(it.broker.links) == [1, 2]


async def test_a_worker_may_receive_packets_before_its_link_is_open_on_its_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others publish as soon as the broker has the link; uvloop reads before it says that the connection is made."""
    opened = Link.open

    async def late(self: Link, sock: socket.socket) -> None:
        await opened(self, sock)
        await asyncio.sleep(0.05)

    async with bus() as it:
        one = await it.join(1)
        one.dispatch(2)
        one.replica.flush()
        monkeypatch.setattr(Link, "open", late)
        second = it.members[2] = Member(peer_id(it.broker.host, 2))
        ours, theirs = socket.socketpair()
        await it.broker.attach(2, ours)
        one.dispatch(1)
        one.replica.flush()
        await second.replica.connect(theirs)
        await until(lambda: second.pod.load.requests == 3 and (RecordKind.ROLL, ROLL) in second.received)
        assert not second.replica.garbled.value
