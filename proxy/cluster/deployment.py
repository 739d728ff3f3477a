"""A host among the other hosts of its deployment, over the store."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import orjson

from proxy.cluster import messages as bodies
from proxy.cluster.membership import Absence, Host, Peers, Shares
from proxy.cluster.messages import (
    EVERYBODY,
    FIRST_NUMBER,
    HUB,
    ID_BYTES,
    OTHER_HOSTS,
    UNREADABLE,
    VERSION,
    Kind,
    Packet,
    Say,
    frame,
    host_of,
    members,
    packed,
    record,
    shared,
    version_of,
)
from proxy.cluster.redis_transport import RedisLine, StoreLost
from proxy.cluster.settings import INTERVAL, ReplicaSettings
from proxy.cluster.transport import Local
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.telemetry.metrics import Catalogue


class ReplicaSeries:
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


log = logging.getLogger(__name__)

BEATS = 5
"""In a lease. A store that lets half a lease pass without one of them is given up."""

LOOKS = 20
"""In a lease, at whose leases are over; two early, so that nothing of a host is left when its lease is over."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two tries to reach the store; at most a beat, so that a host is back well within a lease."""

MOST_WAITING = 4 << 20
"""Bytes that wait for a store that is slow to read; then all of them are dropped, and the others ask."""

MISSED = 0.1
"""The part of what it remembers that a host tells all others when it is back: what they may not have heard."""

LAST_WORDS = 0.5
"""Seconds that a farewell may take."""

_ABSENT = FIRST_NUMBER - 1
"""The number of all others together while nobody hears of them."""


class Line(Protocol):
    """A connection to the store; raises StoreLost, entered and in `lost`. `RedisLine` is one."""

    async def __aenter__(self) -> Line: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def is_slow(self) -> bool:
        """Whether what is published waits."""

    def publish(self, channel: str, message: bytes) -> None: ...

    async def has_room(self) -> None:
        """Waits while it is slow."""

    async def lost(self) -> None:
        """Waits until it is."""


Listen = Callable[[ReplicaSettings, Sequence[str], Callable[[bytes], None]], Line]
"""Makes a connection to the store, by which is heard what comes over these channels."""


class Deployment:
    """`async with Deployment(...)`: never waits for the store, and never fails because of it.

    Packets of a host are numbered, so that one which misses some asks for what is in flight, and takes nothing that
    was overtaken. What a host has in flight is said in absolute numbers; it is forgotten when nothing was heard of
    the host for a lease, and said anew when it is back.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        clock: Clock,
        rng: Random,
        series: ReplicaSeries,
        local: Local,
        config: Callable[[], str],
        own: Callable[[], bytes] = bytes,
        line: Listen = RedisLine,
        gathers: bool = True,
    ) -> None:
        """`config` names the configuration in effect, `own` gives records that the host itself tells who joins.
        `gathers`: what members say comes one by one."""
        self._settings = settings
        self._clock = clock
        self._random = rng
        self._series = series
        self._local = local
        self._config = config
        self._own = own
        self._line = line
        self._gathered_for = INTERVAL if gathers else 0.0
        self._at_once: Line | None = None
        """That what is said goes to without being gathered."""
        self._id = secrets.token_bytes(ID_BYTES)
        self._everybody = f"{settings.prefix}:all"
        self._peers = Peers(clock, settings.lease * (1 - 2 / LOOKS), local.gone)
        self._absence = Absence(lambda batch: local.heard(_ABSENT, batch))
        self.shares = Shares(self._id, settings.limits, settings.lease, clock, lambda batch: local.heard(HUB, batch))
        self._tasks = Tasks()
        self._tells = False
        """Whether what is said goes out."""
        self._is_up = False
        self._why = "it has not been reached yet"
        self._number = 0
        self._queue: list[tuple[Say, str, bytes]] = []
        self._waiting = 0
        self._wake = asyncio.Event()
        self._all_is_said = asyncio.Event()
        self._sent_at: dict[int, float] = {}
        """Of beats that were not heard yet."""
        self._echoed_at = self._looked_at = clock.now()
        self._wants_memory = False
        self._foreign: set[int] = set()
        """Versions of packets that were passed over."""

    async def __aenter__(self) -> Deployment:
        self._tasks.keep(self._stay, "replicas")
        self._tasks.keep(self._look, "leases-of-replicas")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The others are told, so that they need not wait for the lease."""
        if self._tells:
            self._put(Say.BYE, self._everybody, b"")
            if self._queue:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS):
                        await self._all_is_said.wait()
        await self._tasks.stop()

    # What members of this host do.

    def say(self, member: int, batch: bytes) -> None:
        """Of what it says, what others may be told."""
        self.tell(member, shared(batch))

    def tell(self, member: int, records: bytes) -> None:
        """Others may be told all of it."""
        if not self._is_up:
            self._absence.take(member, records)
        if self._tells and records:
            self._put(Say.NEWS, self._everybody, frame(member, records))

    def answer(self, number: int, member: int, batch: bytes) -> None:
        if number == OTHER_HOSTS:
            self.say(member, batch)
        elif (host := self._peers.host_of(number)) is not None and self._tells and (kept := shared(batch)):
            self._put(Say.ANSWER, self._channel(host), frame(member, kept))

    def joined(self, is_first: bool) -> None:
        self._wants_memory |= is_first
        if self._tells:
            self._beat(Say.HELLO)

    def left(self, member: int) -> None:
        self.say(member, record(Kind.RESET, b""))

    # What is shown of it.

    def status(self) -> dict[str, Any]:
        own = self._config()
        return {
            "store": "up" if self._is_up else "away",
            **({} if self._is_up else {"why": self._why, "limits": self._settings.limits}),
            "staleness": round(self._staleness(), 4),
            "others": [
                {"name": host.name, "sameConfig": host.config == own if host.config else None}
                for host in self._peers.hosts
            ],
        }

    @property
    def is_up(self) -> bool:
        return self._is_up

    # The store.

    async def _stay(self) -> None:
        pause, longest = FIRST_PAUSE, max(FIRST_PAUSE, min(LONGEST_PAUSE, self._settings.lease / BEATS))
        while True:
            began = self._clock.now()
            try:
                channels = self._everybody, self._channel_of(self._id)
                async with self._line(self._settings, channels, self._received) as line:
                    self._begin(line)
                    self._lost(await self._first_loss(line))
            except StoreLost as error:
                self._lost(error)
            except Exception as error:
                self._lost(StoreLost(repr(error)))
                raise
            pause = FIRST_PAUSE if self._clock.now() - began > LONGEST_PAUSE else min(longest, 2 * pause)
            await asyncio.sleep(pause * (0.5 + self._random.random() / 2))

    async def _first_loss(self, line: Line) -> StoreLost:
        async with Tasks() as tasks:
            parts = (
                tasks.start(_loss(line.lost()), "replicas: listen"),
                tasks.start(_loss(self._publish(line)), "replicas: publish"),
                tasks.start(_loss(self._live()), "replicas: beat"),
            )
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            loss: StoreLost = done.pop().result()
            return loss

    async def _publish(self, line: Line) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._gathered_for)
            await line.has_room()
            self._wake.clear()
            for channel, message in self._packets():
                self._send(line, channel, message)
            await line.has_room()
            if not self._queue:
                self._all_is_said.set()

    async def _live(self) -> None:
        every = self._settings.lease / BEATS
        while True:
            await asyncio.sleep(every)
            if self._looked_at - self._echoed_at > self._settings.lease / 2:
                raise StoreLost(f"nothing came back for {self._settings.lease / 2:g} s")
            self._beat(Say.BEAT)

    async def _look(self) -> None:
        """Leases run out whether there is a store or not."""
        every = self._settings.lease / LOOKS
        while True:
            self._excuse(self._clock.now() - self._looked_at - every, every)
            self._looked_at = self._clock.now()
            self._peers.sweep()
            self._show()
            await asyncio.sleep(every)

    def _excuse(self, late: float, usual: float) -> None:
        """While this process stood still nobody was silent: what was said meanwhile has yet to be read."""
        if late > usual:
            self._echoed_at += late
            self._peers.excuse(late)

    def _begin(self, line: Line) -> None:
        self._queue.clear()
        self._waiting = 0
        self._sent_at.clear()
        self._echoed_at = self._clock.now()
        self._tells = True
        self._at_once = None if self._gathered_for else line
        self._wants_memory = True
        self._beat(Say.HELLO)
        self._tell(OTHER_HOSTS, MISSED)

    def _lost(self, error: StoreLost) -> None:
        if self._is_up:
            self._series.losses.add()
            self.shares.lost()
            if self._settings.limits == "localShare":
                self._absence.begin(len(self._peers))
        if self._is_up or self._why != str(error):
            log.warning("the store of the replicas is away, each goes on with what it knows: %s", error)
        self._tells = self._is_up = False
        self._at_once = None
        self._why = str(error)
        self._show()

    def _heard_myself(self, number: int) -> None:
        """Whatever was said before has been heard too."""
        sent_at = self._sent_at.get(number)
        if sent_at is None:
            return
        self._sent_at = {later: at for later, at in self._sent_at.items() if later > number}
        self._echoed_at = self._clock.now()
        self._series.staleness.value = self._echoed_at - sent_at
        if not self._is_up:
            self._is_up = True
            self._absence.end()
            self.shares.found()
            self._local.gone(_ABSENT)
            log.info("the store of the replicas is there")
        self._show()

    # What goes out.

    def _put(self, say: Say, channel: str, body: bytes) -> None:
        line = self._at_once
        if line is not None and not self._queue and not line.is_slow:
            self._send(line, channel, self._packet(say, channel, body))
            return
        self._queue.append((say, channel, body))
        self._waiting += len(body)
        if self._waiting > MOST_WAITING:
            self._queue.clear()
            self._waiting = 0
            self._number += 1  # so that all others see that they have missed something
        self._all_is_said.clear()
        self._wake.set()

    def _send(self, line: Line, channel: str, message: bytes) -> None:
        series = self._series
        series.sent.value += len(message)
        series.messages_sent.value += 1
        line.publish(channel, message)

    def _packets(self) -> list[tuple[str, bytes]]:
        """What waits, in its order; news that follow each other are one packet."""
        found: list[tuple[str, bytes]] = []
        queue, self._queue, self._waiting = self._queue, [], 0
        at = 0
        while at < len(queue):
            say, channel, _ = queue[at]
            end = at + 1
            while say in _JOIN and end < len(queue) and queue[end][:2] == (say, channel):
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
        facts = {"members": self._local.members, "config": self._config(), "name": name}
        self._put(say, self._everybody, orjson.dumps(facts))

    def _tell(self, to: int, memory: float) -> None:
        if own := self._own():
            self.answer(to, 0, own)
        self._local.ask(to, memory)

    def _channel(self, host: Host) -> str:
        return self._channel_of(host.id)

    def _channel_of(self, host: bytes) -> str:
        return f"{self._settings.prefix}:to:{host.hex()}"

    # What comes in.

    def _received(self, data: bytes) -> None:
        self._series.received.add(len(data))
        self._series.messages_received.add()
        try:
            packet = Packet.read(data)
            if packet is None:
                self._pass_over(version_of(data))
            elif host_of(data) == self._id:
                self._heard_myself(packet.number)
            elif (host := self._peers.hear(packet)) is not None:
                self._take(host, packet)
        except UNREADABLE as error:
            self._series.garbled.add()
            log.error("dropped a packet of another host: %s: %s", type(error).__name__, error)

    def _pass_over(self, version: int) -> None:
        """Said once: it goes on for as long as a rollout does."""
        self._series.foreign.add()
        if version != VERSION and version not in self._foreign:
            self._foreign.add(version)
            log.warning(
                "replicas: others speak version %d, this one %d: they do not hear of each other before they are of one"
                " release; caps and limits hold for those of each by themselves",
                version,
                VERSION,
            )

    def _take(self, host: Host, packet: Packet) -> None:
        if packet.say in _JOIN:
            for member, batch in members(packet.body):
                self._local.heard(self._peers.number(host, member), shared(batch))
        elif packet.say is Say.BYE:
            self._peers.forget(host)
            self.shares.left(host.id)
            self._show()
            return
        elif packet.say is Say.ASK:
            self._tell(self._peers.number(host, 0), 1.0 if orjson.loads(packet.body) else 0.0)
        else:
            self._take_facts(host, *bodies.facts(packet.body))
            if packet.say is Say.HELLO:
                self._tell(self._peers.number(host, 0), 0.0)
        self._ask(host, packet)
        if packet.say is not Say.NEWS:
            self._divide()

    def _take_facts(self, host: Host, name: str, config: str, there: Sequence[int]) -> None:
        host.name, host.config = name, config
        self._peers.number(host, 0)
        self._peers.keep(host, there)

    def _ask(self, host: Host, packet: Packet) -> None:
        """For what was missed; and the first that answers, for what it remembers."""
        if packet.say is Say.ANSWER and self._wants_memory:
            self._wants_memory = False
            self._put(Say.ASK, self._channel(host), b"true")
        elif self._peers.should_ask(host):
            self._series.missed.add()
            self._put(Say.ASK, self._channel(host), b"false")

    def _staleness(self) -> float:
        """Seconds between what another host does and what is known of it here: as long as what is said here takes to
        come back. While nothing does, the time for which that lasts."""
        if self._is_up and not self._sent_at:
            return float(self._series.staleness.value)
        silence = self._clock.now() - self._echoed_at - self._settings.lease / BEATS
        return max(float(self._series.staleness.value), silence)

    def _divide(self) -> None:
        self.shares.look([host.id for host in self._peers.hosts])

    def _show(self) -> None:
        self._divide()
        series, own = self._series, self._config()
        series.known.value = len(self._peers)
        series.disagreeing.value = sum(bool(host.config) and host.config != own for host in self._peers.hosts)
        series.up.value = float(self._is_up)
        series.staleness.value = self._staleness()


class Alone:
    """The way of a process that is a host by itself to all others."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.tell: Callable[[bytes], None] = partial(deployment.tell, 0)
        self.closed = asyncio.Event()

    def send(self, address: int, records: bytes) -> None:
        if address == EVERYBODY:
            self._deployment.say(0, records)
        else:
            self._deployment.answer(address, 0, records)

    def close(self) -> None:
        self.closed.set()


async def _loss(work: Coroutine[Any, Any, None]) -> StoreLost:
    try:
        await work
    except StoreLost as error:
        return error
    raise AssertionError("it goes on until the store is lost")


_JOIN: Sequence[Say] = (Say.NEWS, Say.ANSWER)
