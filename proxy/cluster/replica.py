"""A process among its peers: it publishes what it does, and applies what they publish."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from proxy.cluster import messages
from proxy.cluster.messages import BROKER, EVERYBODY, UNREADABLE, Kind, record, records, summary
from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.questions import Questions
from proxy.cluster.shared import OwnLoads, PeerLoads, Records, Roster, Shared, SharedLimits, SharedQueue
from proxy.cluster.transport import LATER, PATIENCE, Batch, Link, Transport
from proxy.core.endpoint import Endpoint
from proxy.core.log_limit import LogLimit
from proxy.core.tasks import Tasks
from proxy.telemetry.metrics import Counter

log = logging.getLogger(__name__)

SLICE = 32 * 1024
"""Bytes of a snapshot that are sent, and applied, at once: about a millisecond."""

ALL = 1.0


class SharedState:
    """All values that a process shares, in groups that are replaced as a whole."""

    def __init__(self) -> None:
        self.indexes: Sequence[SharedIndex] = ()
        self.limits: Sequence[SharedLimits] = ()
        self.queues: Sequence[SharedQueue] = ()
        self._others: dict[str, Sequence[Shared]] = {}
        self._by_kind: dict[Kind, list[Shared]] = {}
        self.values: Sequence[Shared] = ()

    def put(
        self,
        *,
        indexes: Sequence[SharedIndex] | None = None,
        limits: Sequence[SharedLimits] | None = None,
        queues: Sequence[SharedQueue] | None = None,
        **others: Sequence[Shared],
    ) -> None:
        """Replace the groups that are given."""
        self.indexes = self.indexes if indexes is None else indexes
        self.limits = self.limits if limits is None else limits
        self.queues = self.queues if queues is None else queues
        self._others.update(others)
        others_values = [value for group in self._others.values() for value in group]
        self.values = [*others_values, *self.indexes, *self.limits, *self.queues]
        self._by_kind = {}
        for value in self.values:
            for kind in value.kinds:
                self._by_kind.setdefault(kind, []).append(value)

    def take(self, peer: int, kind: Kind, body: bytes) -> bool:
        """Apply a record of a peer. Return False for a kind that is not shared here. Raises Garbled."""
        values = self._by_kind.get(kind, ())
        for value in values:
            value.take(peer, kind, body)
        return bool(values)

    def reset(self, peer: int) -> None:
        for value in self.values:
            value.reset(peer)

    def vanished(self, peer: int) -> None:
        for value in self.values:
            value.vanished(peer)

    def in_flight(self) -> Records:
        for value in self.values:
            yield from value.in_flight()

    def memory(self, share: float) -> Records:
        for value in self.values:
            yield from value.memory(share)


class Replica:
    """`take(kind, body)` is called for what the supervisor publishes about pods and the process; `lost()` when the
    supervisor is gone. The owner adds what it shares to `state`."""

    def __init__(
        self,
        *,
        endpoints: Callable[[], Sequence[Endpoint]],
        apply: Callable[[Endpoint, int, int, int], None],
        take: Callable[[Kind, bytes], None],
        lost: Callable[[], None],
        dropped: Counter,
        garbled: Counter,
    ) -> None:
        """`apply` is called for what peers have in flight on a pod: see `shared.Apply`."""
        self._owner_takes = take
        self._lost = lost
        self._dropped = dropped
        self._garbled = garbled
        self._logs = LogLimit()
        self._snapshots: dict[int, float | None] = {}
        """By receiver of a snapshot that is being sent: what it wants remembered in another one, None for no other."""
        self._batch = Batch(rest=self._moves)
        self._tasks = Tasks()
        self._transport: Transport
        self.place = (1, 0)
        """The number of hosts, and which of them this one is."""
        self._are_hosts_heard = False
        self.roster = Roster()
        self.own_loads = OwnLoads(self._batch.touch, self._batch.touch_later, self._batch.touch_soon)
        self._batch.urgent = self.own_loads.take_changes
        self.peer_loads = PeerLoads(self.roster.get, apply, lambda: OwnLoads.all(endpoints()))
        self.state = SharedState()
        self.state.put(loads=[self.peer_loads])
        self.questions = Questions(self._send)
        self.publish = self._batch.add
        self.touch_later, self.flush = self._batch.touch_later, self._batch.flush

    async def connect(self, sock: socket.socket) -> None:
        """Join the other workers of the host over a socket that is connected to the broker."""
        self._use(await Link.over(sock, self.received, self._lost, self._resync, self._dropped))

    def join(self, transport: Transport, interval: float) -> None:
        """Join other hosts, as the only process of this one."""
        self._use(transport)
        self._batch.pace(interval, PATIENCE, LATER)

    def _use(self, transport: Transport) -> None:
        self._transport = transport
        self._batch.send = transport.publish

    async def close(self, last: Sequence[tuple[Kind, bytes]] = ()) -> None:
        """Publish what is left, and `last` to the supervisor."""
        await self._tasks.stop()
        await self.questions.close()
        self._batch.flush()
        for kind, body in last:
            self.send_to_supervisor(kind, body)
        await self._transport.end()
        self._batch.close()

    def send_to_supervisor(self, kind: Kind, body: bytes = b"") -> None:
        self._transport.publish(record(kind, body), BROKER)

    def added(self, endpoint: Endpoint) -> None:
        """A pod joined the fleet."""
        self.roster.added(endpoint)
        self.peer_loads.added(endpoint)

    def removed(self, endpoint: Endpoint) -> None:
        self.roster.removed(endpoint)

    def share_limits(self) -> None:
        """While other hosts are not heard, `replicas.limits` says what they are assumed to spend."""
        for limits in self.state.limits:
            limits.set_hosts(self.place[0] if self._are_hosts_heard else 1)

    # Called by the transport.

    @property
    def members(self) -> list[int]:
        return [0]

    def received(self, peer: int, batch: bytes) -> None:
        try:
            for kind, body in records(batch):
                self._take(peer, kind, body)
        except UNREADABLE as error:
            self._garbled.add()
            if self._logs.allows(type(error)):
                log.error("dropped a message of peer %d (logged once a minute): %s", peer, summary(error))

    def gone(self, peer: int) -> None:
        """A peer is gone, with all that it had in flight."""
        self.state.vanished(peer)

    def send_state(self, to: int, memory: float) -> None:
        """Send what is in flight here, and this part of what is remembered."""
        if to in self._snapshots:
            self._snapshots[to] = max(memory, self._snapshots[to] or 0.0)
        else:
            self._snapshots[to] = None
            self._tasks.start(self._send_snapshots(to, memory), "snapshot")

    async def _send_snapshots(self, to: int, memory: float | None) -> None:
        """However often a receiver asks meanwhile, it is sent one snapshot after this one."""
        try:
            while memory is not None:
                await self._send_all(to, memory)
                memory, self._snapshots[to] = self._snapshots[to], None
        finally:
            del self._snapshots[to]

    def _take(self, peer: int, kind: Kind, body: bytes) -> None:
        if self.state.take(peer, kind, body):
            return
        if kind is Kind.RESET:
            self.state.reset(peer)
        elif kind is Kind.VANISHED:
            self.gone(int.from_bytes(body, "little"))
        elif kind is Kind.SNAPSHOT:
            self.send_state(*messages.snapshot(body))
        elif kind is Kind.HOSTS:
            self._divide(*messages.hosts(body))
        elif kind in Questions.KINDS:
            self.questions.take(BROKER, kind, body)
        else:
            self._owner_takes(kind, body)

    def _divide(self, hosts: int, rank: int, are_heard: bool) -> None:
        self.place, self._are_hosts_heard = (hosts, rank), are_heard
        self.share_limits()
        for queue in self.state.queues:
            queue.among(hosts, rank, are_heard)

    def _moves(self) -> bytes:
        return b"".join([index.take_changes() for index in self.state.indexes])

    def _send(self, address: int, message: bytes) -> None:
        self._transport.publish(message, address)

    def _resync(self) -> None:
        """Some of what this process published was lost on the way to all."""
        self.send_state(EVERYBODY, ALL)

    async def _send_all(self, to: int, memory: float) -> None:
        """What is in flight is sent at once, what is remembered in slices. What waits in the batch goes first: the
        announcement of a reservation must not follow the snapshot that has it."""
        self._batch.flush()
        for index in self.state.indexes:
            index.begin_anew()
        self._transport.publish(self.in_flight(), to)
        if not memory:
            return
        batch: list[bytes] = []
        size = 0
        for kind, body in self.state.memory(memory):
            batch.append(record(kind, body))
            size += len(body)
            if size >= SLICE:
                self._transport.publish(b"".join(batch), to)
                batch.clear()
                size = 0
                await asyncio.sleep(0.001)
        if batch:
            self._transport.publish(b"".join(batch), to)

    def in_flight(self) -> bytes:
        """Return the records of a snapshot of what is in flight here."""
        return record(Kind.RESET, b"") + b"".join([record(kind, body) for kind, body in self.state.in_flight()])
