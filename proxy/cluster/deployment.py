"""The transport between the hosts of a deployment: messages through Redis or Valkey, and which hosts there are."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

import orjson

from proxy.cluster import messages
from proxy.cluster.membership import AssumedSpending, Host, Peers, Shares
from proxy.cluster.messages import (
    BROKER,
    EVERYBODY,
    FIRST_NUMBER,
    ID_BYTES,
    OTHER_HOSTS,
    UNREADABLE,
    VERSION,
    Kind,
    Packet,
    Say,
    frame,
    host_of,
    packed,
    record,
    shared,
    summary,
    version_of,
)
from proxy.cluster.redis_transport import RedisConnection, StoreLost
from proxy.cluster.settings import INTERVAL, ReplicaSettings
from proxy.core.log_limit import LogLimit
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.telemetry.metrics import Catalogue

log = logging.getLogger(__name__)

BEATS = 5
"""Heartbeats in a lease. If none comes back through the store for half a lease, the connection is given up."""

LOOKS = 20
"""Checks for expired leases in a lease. A lease ends two checks early, so that nothing is left when it is over."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two attempts to connect; at most a fifth of a lease."""

MOST_WAITING = 4 << 20
"""Bytes that wait for a store that reads slowly. Beyond them all are dropped, and the other hosts ask."""

MISSED = 0.1
"""The part of what it remembers that a host publishes after a reconnection: what the others may have missed."""

LAST_WORDS = 0.5
"""Seconds for the farewell."""

_TO_ALL = (EVERYBODY, OTHER_HOSTS)
_ABSENT = FIRST_NUMBER - 1
"""The number of all other hosts together while they are not heard."""

_JOINED: Sequence[Say] = (Say.NEWS, Say.ANSWER)
"""Messages that become one packet with the next of their kind."""


class Connection(Protocol):
    """A connection to the store: `redis_transport.RedisConnection`, or one in memory in benchmarks and tests. Raises
    StoreLost when it is entered, and from `lost`."""

    async def __aenter__(self) -> Connection: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def is_slow(self) -> bool:
        """Whether what is published waits."""

    def publish(self, channel: str, message: bytes) -> None: ...

    async def has_room(self) -> None:
        """Return when it is no longer slow."""

    async def lost(self) -> None:
        """Return never: raise StoreLost when the connection is lost."""


Connect = Callable[[ReplicaSettings, Sequence[str], Callable[[bytes], None]], Connection]
"""Makes a connection that calls a function for each message on these channels."""


class Members(Protocol):
    """The processes of this host: `transport.Broker` for several, `replica.Replica` for one."""

    @property
    def members(self) -> list[int]: ...

    def received(self, number: int, batch: bytes) -> None:
        """Apply what a member of another host published."""

    def gone(self, number: int) -> None:
        """A member of another host is gone, with all that it had in flight."""

    def send_state(self, to: int, memory: float) -> None:
        """Have all members send what they have in flight, and one of them this part of what it remembers."""


class ReplicaSeries:
    """What is counted about the other hosts."""

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
    """`async with Deployment(...)`: connects to the store and reconnects; no request waits for it, or fails with it.

    Packets of a host are numbered: a host that misses one asks for what is in flight, and drops a packet that was
    overtaken. What a host has in flight is published in absolute numbers, forgotten when the host has not been heard
    for a lease, and published again when the host is back.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        clock: Clock,
        rng: Random,
        catalogue: Catalogue,
        members: Members,
        config: Callable[[], str],
        own: Callable[[], Iterable[tuple[Kind, bytes]]] = tuple,
        connect: Connect = RedisConnection,
        gathers: bool = True,
    ) -> None:
        """`config` returns the digest of the configuration in use; `own` the records that the host itself adds to its
        state. `gathers`: wait INTERVAL for more to send, since members publish one by one."""
        self._settings = settings
        self._clock = clock
        self._random = rng
        self.series = ReplicaSeries(catalogue)
        self._members = members
        self._config = config
        self._own = own
        self._connect = connect
        self._gathered_for = INTERVAL if gathers else 0.0
        self._direct: Connection | None = None
        """Where packets go without waiting for more."""
        self._id = secrets.token_bytes(ID_BYTES)
        self._everybody = f"{settings.prefix}:all"
        self._peers = Peers(clock, settings.lease * (1 - 2 / LOOKS), members.gone)
        self._assumed = AssumedSpending(lambda batch: members.received(_ABSENT, batch))
        self.shares = Shares(
            self._id, settings.limits, settings.lease, clock, lambda batch: members.received(BROKER, batch)
        )
        self._tasks = Tasks()
        self._publishes = False
        """Whether there is a connection; `is_connected`: whether its own heartbeat came back."""
        self.is_connected = False
        self._why = "it has not been reached yet"
        self._number = 0
        self._queue: list[tuple[Say, str, bytes]] = []
        self._waiting = 0
        self._wake = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._sent_at: dict[int, float] = {}
        """Of heartbeats that have not come back yet, by number."""
        self._echoed_at = self._looked_at = clock.now()
        self._wants_memory = False
        self._logs = LogLimit(clock.now)
        self._foreign: set[int] = set()
        """Versions of packets that were dropped."""

    async def __aenter__(self) -> Deployment:
        self._tasks.keep(self._stay_connected, "replicas")
        self._tasks.keep(self._look, "leases-of-replicas")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye, so that the others need not wait for the lease."""
        if self._publishes:
            self._put(Say.BYE, self._everybody, b"")
            if self._queue:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS):
                        await self._is_flushed.wait()
        await self._tasks.stop()

    # Called by the members of this host.

    def publish(self, batch: bytes, to: int = EVERYBODY, member: int = 0) -> None:
        """Send what a member published to all other hosts, or to the one of the member with this number."""
        batch = shared(batch)
        if to in _TO_ALL:
            if not self.is_connected:
                self._assumed.take(member, batch)
            if self._publishes and batch:
                self._put(Say.NEWS, self._everybody, frame(member, batch))
        elif (host := self._peers.host_of(to)) is not None and self._publishes and batch:
            self._put(Say.ANSWER, self._channel_of(host.id), frame(member, batch))

    async def end(self) -> None:
        """The farewell is sent when the deployment is left."""

    def joined(self, is_first: bool) -> None:
        """A member needs what the others have in flight; the first one, also what they remember."""
        self._wants_memory |= is_first
        if self._publishes:
            self._beat(Say.HELLO)

    def status(self) -> dict[str, Any]:
        own = self._config()
        return {
            "store": "up" if self.is_connected else "away",
            **({} if self.is_connected else {"why": self._why, "limits": self._settings.limits}),
            "staleness": round(self._staleness(), 4),
            "others": [
                {"name": host.name, "sameConfig": host.config == own if host.config else None}
                for host in self._peers.hosts
            ],
        }

    # The connection.

    async def _stay_connected(self) -> None:
        pause, longest = FIRST_PAUSE, max(FIRST_PAUSE, min(LONGEST_PAUSE, self._settings.lease / BEATS))
        while True:
            began = self._clock.now()
            try:
                channels = self._everybody, self._channel_of(self._id)
                async with self._connect(self._settings, channels, self._received) as connection:
                    self._begin(connection)
                    self._lost(await self._first_loss(connection))
            except StoreLost as error:
                self._lost(error)
            except Exception as error:
                self._lost(StoreLost(repr(error)))
                raise
            pause = FIRST_PAUSE if self._clock.now() - began > LONGEST_PAUSE else min(longest, 2 * pause)
            await asyncio.sleep(pause * (0.5 + self._random.random() / 2))

    async def _first_loss(self, connection: Connection) -> StoreLost:
        async with Tasks() as tasks:
            parts = (
                tasks.start(_loss(connection.lost()), "replicas: listen"),
                tasks.start(_loss(self._send_queue(connection)), "replicas: publish"),
                tasks.start(_loss(self._send_beats()), "replicas: beat"),
            )
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            loss: StoreLost = done.pop().result()
            return loss

    async def _send_queue(self, connection: Connection) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._gathered_for)
            await connection.has_room()
            self._wake.clear()
            for channel, message in self._packets():
                self._send(connection, channel, message)
            await connection.has_room()
            if not self._queue:
                self._is_flushed.set()

    async def _send_beats(self) -> None:
        every = self._settings.lease / BEATS
        while True:
            await asyncio.sleep(every)
            if self._looked_at - self._echoed_at > self._settings.lease / 2:
                raise StoreLost(f"nothing came back for {self._settings.lease / 2:g} s")
            self._beat(Say.BEAT)

    async def _look(self) -> None:
        """Leases end whether there is a store or not. While this process stood still the others were not silent: what
        they published meanwhile has yet to be read."""
        every = self._settings.lease / LOOKS
        while True:
            late = self._clock.now() - self._looked_at - every
            if late > every:
                self._echoed_at += late
                self._peers.excuse(late)
            self._looked_at = self._clock.now()
            self._peers.sweep()
            self._show()
            await asyncio.sleep(every)

    def _begin(self, connection: Connection) -> None:
        self._queue.clear()
        self._waiting = 0
        self._sent_at.clear()
        self._echoed_at = self._clock.now()
        self._publishes = True
        self._direct = None if self._gathered_for else connection
        self._wants_memory = True
        self._beat(Say.HELLO)
        self._send_state(OTHER_HOSTS, MISSED)

    def _lost(self, error: StoreLost) -> None:
        if self.is_connected:
            self.series.losses.add()
            self.shares.lost()
            if self._settings.limits == "localShare":
                self._assumed.begin(len(self._peers))
        if self.is_connected or self._why != str(error):
            log.warning("lost connection to the replica store; continuing with local state: %s", error)
        self._publishes = self.is_connected = False
        self._direct = None
        self._why = str(error)
        self._show()

    def _came_back(self, number: int) -> None:
        """A packet of this host came back through the store, and so did all before it."""
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
            self._members.gone(_ABSENT)
            log.info("connected to the replica store")
        self._show()

    # What goes out.

    def _put(self, say: Say, channel: str, body: bytes) -> None:
        direct = self._direct
        if direct is not None and not self._queue and not direct.is_slow:
            self._send(direct, channel, self._packet(say, channel, body))
            return
        self._queue.append((say, channel, body))
        self._waiting += len(body)
        if self._waiting > MOST_WAITING:
            self._queue.clear()
            self._waiting = 0
            self._number += 1  # so that all others notice that they have missed something
        self._is_flushed.clear()
        self._wake.set()

    def _send(self, connection: Connection, channel: str, message: bytes) -> None:
        series = self.series
        series.sent.value += len(message)
        series.messages_sent.value += 1
        connection.publish(channel, message)

    def _packets(self) -> list[tuple[str, bytes]]:
        """Return what waits, in its order. News that follow each other become one packet."""
        found: list[tuple[str, bytes]] = []
        queue, self._queue, self._waiting = self._queue, [], 0
        at = 0
        while at < len(queue):
            say, channel, _ = queue[at]
            end = at + 1
            while say in _JOINED and end < len(queue) and queue[end][:2] == (say, channel):
                end += 1
            found.append((channel, self._packet(say, channel, b"".join([body for _, _, body in queue[at:end]]))))
            at = end
        return found

    def _packet(self, say: Say, channel: str, body: bytes) -> bytes:
        if channel == self._everybody:
            self._number += 1
        if say is Say.BEAT or say is Say.HELLO:
            self._sent_at[self._number] = self._clock.now()
        return packed(say, self._id, self._number, body)

    def _beat(self, say: Say) -> None:
        name = self._settings.name or socket.gethostname()
        facts = {"members": self._members.members, "config": self._config(), "name": name}
        self._put(say, self._everybody, orjson.dumps(facts))

    def _send_state(self, to: int, memory: float) -> None:
        if own := b"".join([record(kind, body) for kind, body in self._own()]):
            self.publish(own, to)
        self._members.send_state(to, memory)

    def _channel_of(self, host: bytes) -> str:
        return f"{self._settings.prefix}:to:{host.hex()}"

    # What comes in.

    def _received(self, data: bytes) -> None:
        self.series.received.add(len(data))
        self.series.messages_received.add()
        try:
            packet = Packet.read(data)
            if packet is None:
                self._drop_foreign(version_of(data))
            elif host_of(data) == self._id:
                self._came_back(packet.number)
            elif (host := self._peers.hear(packet)) is not None:
                self._take(host, packet)
        except UNREADABLE as error:
            self.series.garbled.add()
            if self._logs.allows(type(error)):
                log.error("dropped a packet of another host (logged once a minute): %s", summary(error))

    def _drop_foreign(self, version: int) -> None:
        """Logged once: it lasts as long as a rollout."""
        self.series.foreign.add()
        if version != VERSION and version not in self._foreign:
            self._foreign.add(version)
            log.warning(
                "dropping packets of other proxies with version %d (this one: %d): until all run one release, each"
                " group divides caps and limits among itself",
                version,
                VERSION,
            )

    def _take(self, host: Host, packet: Packet) -> None:
        if packet.say in _JOINED:
            for member, batch in messages.members(packet.body):
                self._members.received(self._peers.number(host, member), shared(batch))
        elif packet.say is Say.BYE:
            self._peers.forget(host)
            self.shares.left(host.id)
            self._show()
            return
        elif packet.say is Say.ASK:
            self._send_state(self._peers.number(host, 0), 1.0 if orjson.loads(packet.body) else 0.0)
        else:
            host.name, host.config, members = messages.facts(packet.body)
            self._peers.number(host, 0)
            self._peers.keep(host, members)
            if packet.say is Say.HELLO:
                self._send_state(self._peers.number(host, 0), 0.0)
        self._ask(host, packet)
        if packet.say is not Say.NEWS:
            self._divide()

    def _ask(self, host: Host, packet: Packet) -> None:
        """Ask for what was missed; the first host that answers, for what it remembers."""
        if packet.say is Say.ANSWER and self._wants_memory:
            self._wants_memory = False
            self._put(Say.ASK, self._channel_of(host.id), b"true")
        elif self._peers.should_ask(host):
            self.series.missed.add()
            self._put(Say.ASK, self._channel_of(host.id), b"false")

    def _staleness(self) -> float:
        """Return how old news of other hosts are, in seconds: what is sent here takes so long to come back. While
        nothing comes back, for how long nothing has."""
        if self.is_connected and not self._sent_at:
            return float(self.series.staleness.value)
        silence = self._clock.now() - self._echoed_at - self._settings.lease / BEATS
        return max(float(self.series.staleness.value), silence)

    def _divide(self) -> None:
        self.shares.look([host.id for host in self._peers.hosts])

    def _show(self) -> None:
        self._divide()
        series, own = self.series, self._config()
        series.known.value = len(self._peers)
        series.disagreeing.value = sum(bool(host.config) and host.config != own for host in self._peers.hosts)
        series.up.value = float(self.is_connected)
        series.staleness.value = self._staleness()


async def _loss(work: Coroutine[Any, Any, None]) -> StoreLost:
    try:
        await work
    except StoreLost as error:
        return error
    raise AssertionError("it goes on until the store is lost")
