"""The replica of a process: it publishes the changes of the process and applies the changes that peers publish."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TypeVar

from proxy.cluster import messages
from proxy.cluster.membership import Peer, Peers, peer_id, peer_number
from proxy.cluster.messages import (
    ALL_PEERS,
    BROKER,
    HOST_BYTES,
    SHARED,
    UNREADABLE,
    InvalidMessage,
    Packet,
    PacketKind,
    RecordKind,
    packet,
    record,
    records,
    summary,
)
from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.questions import Questions
from proxy.cluster.shared import OwnLoads, PeerLoads, PodNumbers, Records, Shared, SharedLimits, SharedQueue
from proxy.cluster.transport import LATER, PATIENCE, STORE_INTERVAL, Batch, Link, Transport
from proxy.core.endpoint import Endpoint
from proxy.core.log_limit import LogLimit
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.telemetry.metrics import Catalogue

log = logging.getLogger(__name__)

SLICE = 32 * 1024
"""Bytes of a snapshot that are sent and applied without a pause: about a millisecond of work."""

PART = 4 * 1024 * 1024
"""Largest size in bytes of a packet with current state."""

ALL, MISSED, RELOADED = 1.0, 0.1, 0.01
"""Parts of the lasting state: for a process that joins, for processes that may have missed some of it, and for a
process that shares a value since its reload, which asks all others."""

BEATS = 5
"""Heartbeats per lease. If none comes back through the store for half a lease, the connection is closed."""

CHECKS = 20
"""Checks for expired leases in one lease. A lease ends two checks early, so that nothing is left when it is over."""

LEASE = 5.0

S = TypeVar("S", bound=Shared)

ONLY_PROCESS = 1
"""The number of the only process of a host."""


def new_id(number: int = ONLY_PROCESS) -> bytes:
    """Return an id on a host that no other process is on."""
    return peer_id(secrets.token_bytes(HOST_BYTES), number)


class SharedState:
    """All values that a process shares, in groups that are replaced as a whole."""

    def __init__(self) -> None:
        self._groups: dict[str, Sequence[Shared]] = {}
        self._by_kind: dict[RecordKind, list[Shared]] = {}
        self.values: Sequence[Shared] = ()
        self.indexes: Sequence[SharedIndex] = ()

    def put(self, **groups: Sequence[Shared]) -> None:
        """Replace these groups."""
        self._groups.update(groups)
        self.values = [value for group in self._groups.values() for value in group]
        self.indexes = self.of(SharedIndex)
        self._by_kind = {}
        for value in self.values:
            for kind in value.kinds:
                self._by_kind.setdefault(kind, []).append(value)

    def of(self, type_: type[S]) -> list[S]:
        return [value for value in self.values if isinstance(value, type_)]

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> bool:
        """Apply a record of a peer. Return False for a kind that is not shared here. Raises InvalidMessage."""
        values = self._by_kind.get(kind, ())
        for value in values:
            value.receive(peer, kind, body)
        return bool(values)

    def lasting(self, part: float) -> Records:
        for value in self.values:
            yield from value.lasting(part)


class Replica:
    """A process among its peers, with any transport. The owner adds the shared values to `state`.

    A process that joins sends HELLO, and every peer replies with its current state; the first peer with lasting
    state, such as prefixes, is asked for that as well. Packets to all are numbered: a process that misses one asks its
    sender for the current state. That is published in absolute numbers, and dropped when its sender sends BYE or was
    not received for a lease.
    """

    def __init__(
        self,
        id: bytes,
        clock: Clock,
        *,
        endpoints: Callable[[], Sequence[Endpoint]],
        apply: Callable[[Endpoint, int, int, int], None],
        receive: Callable[[int, RecordKind, bytes], None],
        catalogue: Catalogue,
        lost: Callable[[], None] = lambda: None,
        snapshot: Callable[[], Records] = tuple,
        lease: float = LEASE,
        beat_every: float = inf,
    ) -> None:
        """`apply` is called for the load of peers on a pod: see `shared.Apply`; `receive(peer, kind, body)` for
        records that are not shared values; `lost()` when the supervisor is gone. `snapshot` returns what a process of
        this host needs in addition to the shared values."""
        self.id, self.host = id, id[:HOST_BYTES]
        self._clock = clock
        self._owner_receives = receive
        self._lost = lost
        self._snapshot = snapshot
        self.dropped = catalogue.bus_dropped.cell()
        """Packets of this host that were dropped because the reader was slow."""
        self.garbled, self.garbled_of_hosts = catalogue.bus_garbled.cell(), catalogue.replicas_garbled.cell()
        """Unreadable packets of this host, and of other hosts."""
        self._lease = lease
        self._beat_every = min(beat_every, lease / BEATS)
        self._number = 0
        is_supervisor = peer_number(id) == BROKER
        self.all_of_host = peer_id(self.host, ALL_PEERS)
        """The address of all processes of this host."""
        self._reply_to = self.all_of_host if is_supervisor else id
        self._batch = Batch(
            self._send_local if is_supervisor else partial(self._send, PacketKind.NEWS),
            lambda: b"".join([index.collect_changes() for index in self.state.indexes]),
        )
        self._tasks = Tasks()
        self._logs = LogLimit()
        self._snapshots: dict[bytes | None, float | None] = {}
        """Snapshots that are being sent, by receiver: the part of the lasting state that it requests in another
        snapshot; None if it requests no other."""
        self._transport: Transport
        self._wants_lasting = False
        self.peers = Peers(self.host, clock, lease * (1 - 2 / CHECKS), self._gone)
        self.facts: Callable[[], bytes] = bytes
        """Returns the body of a BEAT."""
        self.missed: Callable[[], None] = lambda: None
        """Called when a packet of another host was missed."""
        self.checked: Callable[[float], None] = lambda late: None
        """Called after each check of the leases, with the seconds for which this process was blocked."""
        self.publishes_lasting = True
        """Whether this process publishes lasting state to all hosts; one process of each host does."""
        self.place = (1, 0)
        """The number of hosts, and the position of this one among them."""
        self._are_hosts_reached = False
        self.roster = PodNumbers()
        self.own_loads = OwnLoads(self._batch.touch, self._batch.touch_later, self._batch.touch_soon, self.roster.get)
        self._batch.urgent = self.own_loads.collect_changes
        self.peer_loads = PeerLoads(self.roster.get, apply, lambda: OwnLoads.all(endpoints()))
        self.state = SharedState()
        self.state.put(loads=[self.peer_loads])
        self.questions = Questions(self._send_direct)
        self.publish = self._batch.add
        """Send a record with the next batch: to all, or from a supervisor to its workers. Other hosts ignore kinds
        outside SHARED."""
        self.touch_later, self.flush = self._batch.touch_later, self._batch.flush

    def use(self, transport: Transport) -> None:
        self._transport = transport

    async def connect(self, sock: socket.socket) -> None:
        """Join the other workers of the host over a socket that is connected to the broker."""
        link = Link(self.received, self._lost, lambda: self.send_state(None, ALL), self.dropped)
        self.use(link)
        await link.open(sock)
        self.start()
        self.hello()

    def join(self, transport: Transport) -> None:
        """Join other hosts, as the only process of this one."""
        self.use(transport)
        self._batch.pace(STORE_INTERVAL, PATIENCE, LATER)

    def start(self) -> None:
        """Send heartbeats, and end leases."""
        self._tasks.keep(self._beat, "heartbeats-of-replicas")
        self._tasks.keep(self._check_leases, "leases-of-replicas")

    def hello(self) -> None:
        """Join, or join again: peers may have missed what was published."""
        self._wants_lasting = True
        self._send(PacketKind.HELLO, self.facts())
        self.send_state(None, MISSED if self.publishes_lasting else 0.0)

    def bye(self) -> None:
        self._batch.flush()
        self._send(PacketKind.BYE, b"")

    async def close(self) -> None:
        """Publish the remaining changes."""
        await self._tasks.stop()
        await self.questions.close()
        self._batch.flush()
        await self._transport.end()
        self._batch.close()

    def send_to_supervisor(self, kind: RecordKind, body: bytes = b"") -> None:
        self._send_direct(BROKER, record(kind, body))

    def publish_local(self, kind: RecordKind, body: bytes) -> None:
        """Send a record to the processes of this host at once."""
        self._send_local(record(kind, body))

    def publish_to_all(self, kind: RecordKind, body: bytes) -> None:
        """Send a record to all processes of all hosts at once."""
        self._send(PacketKind.NEWS, record(kind, body))

    def added(self, endpoint: Endpoint) -> None:
        """Handle a pod that joined the fleet."""
        self.roster.added(endpoint)
        self.peer_loads.added(endpoint)

    def removed(self, endpoint: Endpoint) -> None:
        self.roster.removed(endpoint)

    def share(self, values: Sequence[Shared]) -> None:
        """Replace the values of the configuration. What peers published of a new one before was dropped, because a
        deployment does not reload everywhere at once: ask all of them for it."""
        known, peers = self.state.values, self.peers.that_serve
        self.state.put(configuration=values)
        if peers and any(value not in known for value in values):
            self.send_state(None, 0.0)  # without loans of a queue that an earlier configuration had
            for peer in peers:
                self._send(PacketKind.ASK, messages.question(self._reply_to, RELOADED), peer)

    @property
    def spending_hosts(self) -> int:
        """The number of hosts that spend from the limits, as far as they can be reached."""
        return self.place[0] if self._are_hosts_reached else 1

    def divide(self, hosts: int, position: int, are_reached: bool) -> None:
        """Divide caps and limits by the hosts of the deployment."""
        self.place, self._are_hosts_reached = (hosts, position), are_reached
        for limits in self.state.of(SharedLimits):
            limits.limiter.set_hosts(self.spending_hosts)
        for queue in self.state.of(SharedQueue):
            queue.divide(hosts, position, are_reached)

    def send_state(self, to: bytes | None, lasting: float) -> None:
        """Send the current state, and this part of the lasting state, to an address or to all."""
        if to in self._snapshots:
            self._snapshots[to] = max(lasting, self._snapshots[to] or 0.0)
        else:
            self._snapshots[to] = None
            self._tasks.start(self._send_snapshots(to, lasting), "snapshot")

    # Called by the transport.

    def received(self, packet: Packet) -> None:
        try:
            peer = self.peers.receive(packet)
            if peer is not None:
                self._apply(peer, packet)
        except UNREADABLE as error:
            is_local = packet.sender.startswith(self.host)
            (self.garbled if is_local else self.garbled_of_hosts).add()
            if self._logs.allows(type(error)):
                log.error(
                    "dropped a packet of process %s of %s host (logged once a minute): %s",
                    packet.sender.hex(),
                    "this" if is_local else "another",
                    summary(error),
                )

    def _apply(self, peer: Peer, packet: Packet) -> None:
        if self.peers.should_ask(peer):
            if peer.has_missed and not peer.is_local:
                self.missed()
            self._send(PacketKind.ASK, messages.question(self._reply_to, 0.0), peer.id)
        packet_kind = packet.kind
        if packet_kind is PacketKind.BYE:
            self.peers.forget(peer)
        elif packet_kind is PacketKind.ASK:
            to, lasting = messages.read_question(packet.body)
            if not to.startswith(peer.host):
                raise InvalidMessage("a process asks for another host")
            self.send_state(to, lasting)
        elif packet_kind is PacketKind.BEAT or packet_kind is PacketKind.HELLO:
            if packet.body:
                peer.name, peer.config = messages.facts(packet.body)
            if packet_kind is PacketKind.HELLO:
                self._welcome(peer)
        else:
            for kind, body in records(packet.body):
                if peer.is_local or kind in SHARED:
                    self._receive(peer, kind, body)

    def _welcome(self, peer: Peer) -> None:
        """Reply to HELLO. The supervisor of this host sends it when the store is reached again: then all hosts need the
        current state. The supervisor of another host sends it for all of its workers."""
        if not peer.is_supervisor:
            self.send_state(peer.id, 0.0)
        elif peer.is_local:
            self.send_state(None, MISSED if self.publishes_lasting else 0.0)
        else:
            self.send_state(peer_id(peer.host, ALL_PEERS), 0.0)

    def _receive(self, peer: Peer, kind: RecordKind, body: bytes) -> None:
        if self.state.receive(peer.number, kind, body):
            return
        if kind is RecordKind.RESET:
            for value in self.state.values:
                value.reset(peer.number)
        elif kind is RecordKind.HAS_LASTING:
            if self._wants_lasting:
                self._wants_lasting = False
                self._send(PacketKind.ASK, messages.question(self._reply_to, ALL), peer.id)
        elif kind is RecordKind.HOSTS and peer.is_supervisor:
            self.divide(*messages.hosts(body))
        elif kind in Questions.KINDS:
            self.questions.receive(peer.number, kind, body)
        else:
            self._owner_receives(peer.number, kind, body)

    def _gone(self, peer: int) -> None:
        for value in self.state.values:
            value.vanished(peer)
        self.questions.forget(peer)

    def _current(self, to: bytes | None) -> Records:
        if to is not None and to.startswith(self.host):
            yield from self._snapshot()  # first, because ejections of unknown pods are lost
        for value in self.state.values:
            yield from value.current()
        if to is not None and next(iter(self.state.lasting(ALL)), None) is not None:
            yield RecordKind.HAS_LASTING, b""

    def _send(self, kind: PacketKind, body: bytes, to: bytes | None = None) -> None:
        if to is None:
            self._number += 1
        self._transport.publish(packet(kind, self.id, self._number, body, to))

    def _send_local(self, message: bytes) -> None:
        self._send(PacketKind.DIRECT, message, self.all_of_host)

    def _send_direct(self, number: int, message: bytes) -> None:
        """Send a packet to one process, after the packets that wait for all: a reply must not overtake the data that it
        refers to."""
        self._batch.flush()
        self._send(PacketKind.DIRECT, message, peer_id(self.host, number))

    def _send_part(self, batch: list[bytes], to: bytes | None) -> None:
        self._send(PacketKind.NEWS if to is None else PacketKind.STATE, b"".join(batch), to)
        batch.clear()

    async def _send_snapshots(self, to: bytes | None, lasting: float | None) -> None:
        """Send snapshots to a receiver. All its requests meanwhile are served by one further snapshot."""
        try:
            while lasting is not None:
                await self._send_snapshot(to, lasting)
                lasting, self._snapshots[to] = self._snapshots[to], None
        finally:
            del self._snapshots[to]

    async def _send_snapshot(self, to: bytes | None, lasting: float) -> None:
        """Send the current state without a pause, and the lasting state in slices. The current batch is sent
        first, because the announcement of a reservation must not follow a snapshot that contains it."""
        self._batch.flush()
        for index in self.state.indexes:
            index.publish_whole_chains()
        size, batch = 0, [record(RecordKind.RESET, b"")]
        for kind, body in self._current(to):
            batch.append(record(kind, body))
            size += len(body)
            if size >= PART:
                self._send_part(batch, to)
                size = 0
        self._send_part(batch, to)
        if not lasting:
            return
        size = 0
        for kind, body in self.state.lasting(lasting):
            batch.append(record(kind, body))
            size += len(body)
            if size >= SLICE:
                self._send_part(batch, to)
                size = 0
                await asyncio.sleep(0.001)
        if batch:
            self._send_part(batch, to)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_every)
            self._send(PacketKind.BEAT, self.facts())

    async def _check_leases(self) -> None:
        """Check the leases of peers. The time for which this process was blocked does not count, because packets of
        that time are still unread."""
        every, checked_at = self._lease / CHECKS, self._clock.now()
        while True:
            now = self._clock.now()
            late = now - checked_at - every
            late = late if late > every else 0.0
            checked_at = now
            self.peers.excuse(late)
            self.peers.sweep()
            self.checked(late)
            await asyncio.sleep(every)
