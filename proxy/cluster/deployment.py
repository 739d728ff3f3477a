"""A host in its deployment: connects to the store and reconnects, counts messages, and divides caps and limits."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from types import TracebackType
from typing import Any, Protocol

import orjson

from proxy.cluster.membership import AssumedSpending, HostDivision, peer_id
from proxy.cluster.messages import (
    ABSENT,
    HOST_BYTES,
    UNREADABLE,
    VERSION,
    Packet,
    PacketKind,
    RecordKind,
    message,
    packet,
    packets,
    summary,
)
from proxy.cluster.redis_transport import RedisConnection, StoreLost
from proxy.cluster.replica import BEATS, Replica
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.transport import STORE_INTERVAL
from proxy.core.log_limit import LogLimit
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks, run_together
from proxy.telemetry.metrics import Catalogue

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two attempts to connect; at most a fifth of a lease."""

MOST_WAITING = 4 << 20
"""Bytes that may wait for a store that reads slowly. Beyond this limit packets are dropped, and the other hosts request
a snapshot."""


class StoreConnection(Protocol):
    """A connection to the store: `redis_transport.RedisConnection`, or one in memory in benchmarks and tests. Raises
    StoreLost when it is entered, and from `lost`."""

    async def __aenter__(self) -> StoreConnection: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def waiting(self) -> int:
        """The number of published bytes that wait to be sent."""

    def publish(self, channel: str, message: bytes) -> None: ...

    async def lost(self) -> None:
        """Wait until the connection is lost, and then raise StoreLost. Never return."""


Connect = Callable[[ReplicaSettings, Sequence[str], Callable[[bytes], None]], StoreConnection]
"""A factory of connections. The connection calls a function for each message on these channels."""


class ReplicaSeries:
    """Metrics about the other hosts."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.known = catalogue.replicas_known.cell()
        self.disagreeing = catalogue.replicas_disagreeing.cell()
        self.up = catalogue.replicas_store_up.cell()
        self.staleness = catalogue.replicas_staleness.cell()
        self.losses = catalogue.replicas_store_losses.cell()
        self.missed = catalogue.replicas_missed.cell()
        self.garbled = catalogue.replicas_garbled.cell()
        self.foreign = catalogue.replicas_foreign.cell()
        self.sent, self.received = (catalogue.replicas_bytes.cell(way) for way in ("sent", "received"))
        self.messages_sent, self.messages_received = (
            catalogue.replicas_messages.cell(way) for way in ("sent", "received")
        )


class Deployment:
    """`async with Deployment(...)`: connects to the store and reconnects; no request fails with it.

    It carries packets of the `replica`, and of the workers of a supervisor, to the other hosts.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        clock: Clock,
        rng: Random,
        catalogue: Catalogue,
        replica: Replica,
        config: Callable[[], str],
        received: Callable[[Packet], None] | None = None,
        connect: Connect = RedisConnection,
    ) -> None:
        """`config` returns the digest of the configuration in use. `received` is called for packets of other hosts;
        without it, the replica is the only process of this host."""
        self._settings = settings
        self._clock = clock
        self._random = rng
        self.series = ReplicaSeries(catalogue)
        self._replica = replica
        self._config = config
        self._received_by = replica.received if received is None else received
        self._connect = connect
        self._gathered_for = 0.0 if received is None else STORE_INTERVAL
        """Seconds to wait for more to send: workers publish one by one."""
        self._connection: StoreConnection | None = None
        self._everybody = f"{settings.prefix}:all"
        self._absent = peer_id(replica.host, ABSENT)
        self._assumed = AssumedSpending(
            lambda batch: self._received_by(packet(PacketKind.DIRECT, self._absent, 0, batch, replica.all_of_host))
        )
        self.shares = HostDivision(replica.host, settings.limits, settings.lease, clock, self._divided)
        self._tasks = Tasks()
        self.is_connected = False
        """Whether the host's own heartbeat came back."""
        self._why = "it has not been reached yet"
        self._gathered: list[tuple[str, bytes]] = []
        self._sent_at: dict[int, float] = {}
        """Send times of heartbeats that have not come back yet, by number."""
        self._echoed_at = self._checked_at = clock.now()
        self._logs = LogLimit(clock.now)
        self._foreign: set[int] = set()
        """Versions of packets that were dropped."""
        replica.facts, replica.checked, replica.missed = self._facts, self._check, self.series.missed.add
        replica.peers.changed = self._show

    async def __aenter__(self) -> Deployment:
        self._tasks.keep(self._stay_connected, "replicas")
        self._replica.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send a farewell, so that the others do not wait for the end of the lease."""
        self._replica.bye()
        self._send_gathered()
        await self._tasks.stop()

    def publish(self, packet: Packet) -> None:
        """Send a packet of a process of this host."""
        kind, to = packet.kind, packet.to
        if to is not None and to.startswith(self._replica.host):
            return
        if kind is PacketKind.NEWS and not self.is_connected:
            self._assumed.add(packet.sender, packet.body)
        if self._connection is None:
            return
        if (kind is PacketKind.BEAT or kind is PacketKind.HELLO) and packet.sender == self._replica.id:
            self._sent_at[packet.number] = self._clock.now()
        self._put(self._everybody if to is None else self._channel_of(to[:HOST_BYTES]), packet.packed)

    async def end(self) -> None:
        """Do nothing: the farewell is sent when the deployment is left."""

    def status(self) -> dict[str, Any]:
        own = self._config()
        return {
            "store": "up" if self.is_connected else "away",
            **({} if self.is_connected else {"why": self._why, "limits": self.shares.policy}),
            "staleness": round(self._staleness(), 4),
            "others": [
                {"name": name, "sameConfig": config == own if config else None}
                for name, config in self._replica.peers.hosts.values()
            ],
        }

    # The connection.

    async def _stay_connected(self) -> None:
        pause, longest = FIRST_PAUSE, max(FIRST_PAUSE, min(LONGEST_PAUSE, self._settings.lease / BEATS))
        while True:
            started = self._clock.now()
            try:
                channels = self._everybody, self._channel_of(self._replica.host)
                async with self._connect(self._settings, channels, self._received) as connection:
                    await self._use(connection)
            except StoreLost as error:
                self._lost(error)
            except Exception as error:
                self._lost(StoreLost(repr(error)))
                raise
            pause = FIRST_PAUSE if self._clock.now() - started > LONGEST_PAUSE else min(longest, 2 * pause)
            await asyncio.sleep(pause * (0.5 + self._random.random() / 2))

    async def _use(self, connection: StoreConnection) -> None:
        """Use a connection until it is lost."""
        self._start(connection)
        try:
            await run_together(connection.lost(), self._watch_echoes())
        except StoreLost as error:
            self._lost(error)

    async def _watch_echoes(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease / BEATS)
            if self._checked_at - self._echoed_at > self._settings.lease / 2:
                raise StoreLost(f"nothing came back for {self._settings.lease / 2:g} s")

    def _check(self, late: float) -> None:
        self._echoed_at += late
        self._checked_at = self._clock.now()
        self._show()

    def _start(self, connection: StoreConnection) -> None:
        self._gathered.clear()
        self._sent_at.clear()
        self._echoed_at = self._clock.now()
        self._connection = connection
        self._replica.hello()

    def _lost(self, error: StoreLost) -> None:
        if self.is_connected:
            self.series.losses.add()
            self.shares.lost()
            self._assumed.start(self.shares.place[0] - 1)
        if self.is_connected or self._why != str(error):
            log.warning("lost connection to the replica store; continuing with local state: %s", error)
        self._connection, self.is_connected = None, False
        self._why = str(error)
        self._show()

    def _came_back(self, number: int) -> None:
        """A heartbeat of this host came back through the store, and so did all before it."""
        sent_at = self._sent_at.get(number)
        if sent_at is None:
            return
        self._sent_at = {later: at for later, at in self._sent_at.items() if later > number}
        self._echoed_at = self._clock.now()
        self.series.staleness.value = self._echoed_at - sent_at
        if not self.is_connected:
            self.is_connected = True
            self._assumed.end()
            self.shares.found()
            self._received_by(packet(PacketKind.BYE, self._absent, 0, b""))
            log.info("connected to the replica store")
        self._show()

    # What goes out.

    def _put(self, channel: str, packed: bytes) -> None:
        if not self._gathered_for:
            self._send(channel, packed)
            return
        if not self._gathered:
            asyncio.get_running_loop().call_later(self._gathered_for, self._send_gathered)
        self._gathered.append((channel, packed))

    def _send_gathered(self) -> None:
        """Send the gathered packets in order. Consecutive packets for one channel become one message."""
        gathered, self._gathered = self._gathered, []
        for channel, same in groupby(gathered, itemgetter(0)):
            self._send(channel, b"".join([packed for _, packed in same]))

    def _send(self, channel: str, packed: bytes) -> None:
        connection, series = self._connection, self.series
        if connection is None or connection.waiting > MOST_WAITING:
            return  # the others notice the gap in the numbers
        data = message(packed)
        series.sent.value += len(data)
        series.messages_sent.value += 1
        connection.publish(channel, data)

    def _facts(self) -> bytes:
        name = self._settings.name or socket.gethostname()
        return orjson.dumps({"name": name, "config": self._config()})

    def _channel_of(self, host: bytes) -> str:
        return f"{self._settings.prefix}:to:{host.hex()}"

    # What comes in.

    def _received(self, data: bytes) -> None:
        self.series.received.add(len(data))
        self.series.messages_received.add()
        if data[:1] != message(b""):
            self._drop_foreign(data)
            return
        try:
            for each in packets(data):
                self._deliver(each)
        except UNREADABLE as error:
            self.series.garbled.add()
            if self._logs.allows(type(error)):
                log.error("dropped a packet of another host (logged once a minute): %s", summary(error))

    def _deliver(self, packet: Packet) -> None:
        """Receive a message of the store. Packets of this host come back and are ignored."""
        host = packet.sender[:HOST_BYTES]
        if host == self._replica.host:
            if packet.sender == self._replica.id:
                self._came_back(packet.number)
        else:
            self._received_by(packet)
            if packet.kind is PacketKind.BYE and host not in self._replica.peers.hosts:
                self.shares.left(host)
                self._show()

    def _drop_foreign(self, data: bytes) -> None:
        """Drop a packet of another version. Log it once per version, because a rollout lasts a while."""
        self.series.foreign.add()
        version = data[0] if data else 0
        if version not in self._foreign:
            self._foreign.add(version)
            log.warning(
                "dropping packets of other proxies with version %d (this one: %d): until all run one release, each"
                " group divides caps and limits among itself",
                version,
                VERSION,
            )

    def _staleness(self) -> float:
        """Return the round trip of this host's last heartbeat over the store in seconds. While none comes back, it is
        the delay of the next one."""
        if self.is_connected and not self._sent_at:
            return float(self.series.staleness.value)
        silence = self._clock.now() - self._echoed_at - self._settings.lease / BEATS
        return max(float(self.series.staleness.value), silence)

    def _divided(self, hosts: int, position: int, is_up: bool) -> None:
        """Divide caps and limits by hosts, in all processes of this one."""
        self._replica.divide(hosts, position, is_up)
        self._replica.publish_local(RecordKind.HOSTS, orjson.dumps((hosts, position, is_up)))

    def _show(self) -> None:
        known = self._replica.peers.hosts
        self.shares.divide(known)
        series, own = self.series, self._config()
        series.known.value = len(known)
        series.disagreeing.value = sum(bool(config) and config != own for _, config in known.values())
        series.up.value = float(self.is_connected)
        series.staleness.value = self._staleness()
