"""Batches of records, and the transport of packets between the processes of a host: a link from each worker to the
broker, which the supervisor runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from proxy.cluster.membership import peer_id, peer_number
from proxy.cluster.messages import (
    ALL_PEERS,
    BROKER,
    InvalidMessage,
    Packet,
    PacketKind,
    Packets,
    RecordKind,
    packet,
    record,
)
from proxy.telemetry.metrics import Counter

if TYPE_CHECKING:
    from proxy.cluster.deployment import Deployment
    from proxy.cluster.replica import Replica

log = logging.getLogger(__name__)

BACKLOG = 8 * 1024 * 1024
"""Bytes that may wait for a slow reader. Beyond this limit packets are dropped."""

LOCAL_INTERVAL, STORE_INTERVAL = 0.005, 0.01
"""Seconds for which a batch is gathered, within a host and between hosts."""

SOON = 0.002
"""Largest delay in seconds before other processes know of a dispatched long prompt."""

AT_ONCE, LITTLE = 0.001, 40
"""Seconds for which a batch is gathered while there is little to send, and the number of bytes per interval below which
that holds."""

ENOUGH = 250
"""Size in bytes from which a batch is worthwhile, some four requests: below it, the batch costs more than its
content."""

LOCAL_LATER, LATER = 0.02, 0.1
"""Seconds that prefixes and decreased loads may wait, within a host and between hosts: they are most of the cost of a
batch, and the delay does not make placement worse (`bench/hearsay.py`)."""

PATIENCE = 5.0
"""Largest number of intervals for which a batch between hosts is gathered, while batches are small."""

HOST_DELAY = 0.1
"""Largest delay in seconds of a message from a worker of one host to a worker of another."""

SMOOTH = 0.1
"""Weight of the latest interval in the mean rate of bytes."""

_NEVER = -math.inf


_BUFFER = 256 * 1024


class Transport(Protocol):
    """How a process reaches the others: a `Link` from a worker, the `Broker` from a supervisor, a `Deployment` from the
    only process of a host."""

    def publish(self, packet: Packet) -> None:
        """Send a packet to its receiver, or to all. Never waits."""

    async def end(self) -> None:
        """Send the waiting data, and close."""


class Link(asyncio.Protocol):
    """One connection between a worker and the broker: whole packets, and a bound on what waits for a slow reader.

    `received(packet)` is called for each packet; `lost()` once, when the other side is gone; `missed()` when the
    reader has caught up after packets were dropped.
    """

    def __init__(
        self,
        received: Callable[[Packet], None],
        lost: Callable[[], None],
        missed: Callable[[], None],
        dropped: Counter,
        backlog: int = BACKLOG,
    ) -> None:
        self._received = received
        self._lost = lost
        self._missed = missed
        self._dropped = dropped
        self._backlog = backlog
        self._packets = Packets()
        self._has_gap = False
        """Whether a packet was dropped, or published before the link was open."""
        self._has_ended = False
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    async def open(self, sock: socket.socket) -> None:
        """Use a connected socket. Packets may be received before this returns."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def publish(self, packet: Packet) -> None:
        if self._has_ended:
            return
        transport = self._transport
        if transport is None:
            self._has_gap = True
        elif transport.get_write_buffer_size() < self._backlog:
            transport.write(packet.packed)
        else:
            self._dropped.add(1)
            self._has_gap = True

    async def end(self) -> None:
        """Write the end of the stream; the other side closes when it has read everything. If this side closed, a
        concurrent write of the other side would fail before it has read the rest."""
        if not self._has_ended:
            self._has_ended = True
            if self._transport is not None:
                self._transport.write_eof()
        await self.closed.wait()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        try:
            for each in self._packets.feed(data):
                self._received(each)
        except InvalidMessage as error:
            log.error("closed the link to a process of this host: unreadable packet: %s", error)
            self.abort()

    def resume_writing(self) -> None:
        if self._has_gap and not self._has_ended:
            self._has_gap = False
            self._missed()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = True
        self.closed.set()
        self._lost()


class Broker:
    """Passes packets between the workers of a host, the supervisor's `replica` and, if there is a `deployment`, other
    hosts. `lost(worker)` is called when a worker is gone."""

    def __init__(self, replica: Replica, lost: Callable[[int], None]) -> None:
        self._replica = replica
        self._on_lost = lost
        self.links: dict[int, Link] = {}
        """By the number of the worker."""
        self.host = replica.host
        self._all_peers = peer_id(self.host, ALL_PEERS)
        self.deployment: Deployment | None = None
        """The other hosts. Set by the owner, if the host has a deployment."""
        self.questions, self.received_at = replica.questions, replica.peers.received_at
        replica.use(self)

    async def attach(self, worker: int, sock: socket.socket) -> None:
        """Connect a new worker. Numbers of workers are never reused."""
        id = peer_id(self.host, worker)
        link = Link(
            lambda packet: self._pass_on(packet, worker),
            lambda: self._lost(worker),
            lambda: self._replica.send_state(id, 0.0),
            self._replica.dropped,
        )
        self.links[worker] = link
        await link.open(sock)

    async def end(self) -> None:
        for link in list(self.links.values()):
            link.abort()

    def publish(self, packet: Packet) -> None:
        """Send a packet of the supervisor."""
        self._pass_on(packet, BROKER)

    def received(self, packet: Packet) -> None:
        """Pass on a packet of another host."""
        self._pass_on(packet, None)

    def _pass_on(self, packet: Packet, sender: int | None) -> None:
        """`sender` is the number of a process of this host."""
        to = packet.to
        if to is None or to == self._all_peers:
            for worker, link in self.links.items():
                if worker != sender:
                    link.publish(packet)
            if to is None and sender is not None and self.deployment is not None:
                self.deployment.publish(packet)
            if sender != BROKER:
                self._replica.received(packet)
        elif not to.startswith(self.host):
            if self.deployment is not None and sender is not None:
                self.deployment.publish(packet)
        elif (receiver := peer_number(to)) == BROKER:
            self._replica.received(packet)
        elif (to_link := self.links.get(receiver)) is not None:
            to_link.publish(packet)

    def _lost(self, worker: int) -> None:
        if self.links.pop(worker, None) is None:
            return
        self._pass_on(packet(PacketKind.BYE, peer_id(self.host, worker), 0, b""), worker)
        self._on_lost(worker)


class Batch:
    """Records that are gathered for a short while, so that a busy process sends batches and not every event. A batch
    contains the result of `urgent()` and the added records; the result of `rest()`, which may wait for `later` seconds,
    is sent with the last batch before that time is over. A batch is gathered for `interval`, and up to `patience` times
    as long where that makes it worthwhile. If too little is sent for any batch to be worthwhile, records are sent
    within a millisecond (between hosts)."""

    def __init__(self, send: Callable[[bytes], None], rest: Callable[[], bytes] = bytes) -> None:
        self.send = send
        self.urgent: Callable[[], bytes] = bytes
        self._rest = rest
        self.pace()
        self._records: list[bytes] = []
        self._soon: asyncio.TimerHandle | None = None
        """When records and urgent data are sent; `_late`: everything, at `_late_at`."""
        self._late: asyncio.TimerHandle | None = None
        self._late_at = math.inf

    def pace(self, interval: float = LOCAL_INTERVAL, patience: float = 1.0, later: float = LOCAL_LATER) -> None:
        self._later = later
        self._shortest, self._longest = interval, interval * patience
        self._interval = self._near = interval
        """The rest is sent with a batch if at most `_near` seconds are left."""
        self._size = 0
        """Bytes since everything was last sent, at `_sent_at` by the clock of the loop; `_rate`: bytes per second."""
        self._rate, self._sent_at = 0.0, _NEVER

    def add(self, kind: RecordKind, body: bytes) -> None:
        self._records.append(record(kind, body))
        self.touch()

    def touch(self) -> None:
        """Schedule a batch, because there is data to send soon."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_at(loop.time() + self._interval, self._send_soon)

    def touch_soon(self) -> None:
        """Schedule a batch within SOON, however long batches are gathered."""
        loop = asyncio.get_running_loop()
        if self._soon is not None:
            if self._soon.when() <= loop.time() + SOON:
                return
            self._soon.cancel()
        self._soon = loop.call_at(loop.time() + min(self._interval, SOON), self._send_soon)

    def touch_later(self) -> None:
        """Schedule the sending of data that may wait."""
        if self._later <= self._interval:
            self.touch()
        elif self._late is None:
            loop = asyncio.get_running_loop()
            self._late_at = loop.time() + self._later
            self._late = loop.call_at(self._late_at, self.flush)

    def flush(self) -> None:
        """Send everything now."""
        self._cancel()
        self._send(self.urgent() + self._rest())
        if self._size and self._longest > self._shortest:
            self._adapt(self._size, asyncio.get_running_loop().time())
            self._size = 0

    def close(self) -> None:
        """Drop the unsent data."""
        self._cancel()
        self._records.clear()

    def _send_soon(self) -> None:
        self._soon = None
        if self._late is None or self._late_at - asyncio.get_running_loop().time() < self._near:
            self.flush()
        else:
            self._send(self.urgent())

    def _send(self, batch: bytes) -> None:
        if self._records:
            batch += b"".join(self._records)
            self._records.clear()
        if batch:
            self._size += len(batch)
            self.send(batch)

    def _adapt(self, size: int, now: float) -> None:
        self._rate += SMOOTH * (size / max(self._shortest, now - self._sent_at) - self._rate)
        self._sent_at = now
        if self._rate * self._shortest < LITTLE:
            self._interval, self._near = min(self._shortest, AT_ONCE), math.inf
            return
        enough = self._rate * self._longest >= ENOUGH
        self._interval = self._near = max(self._shortest, ENOUGH / self._rate) if enough else self._shortest

    def _cancel(self) -> None:
        for timer in (self._soon, self._late):
            if timer is not None:
                timer.cancel()
        self._soon = self._late = None
