"""The transport within a host: a link from each worker to the broker, over unix sockets."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import orjson

from proxy.cluster.messages import EVERYBODY, HUB, UNREADABLE, Frames, Garbled, Kind, frame, record, records
from proxy.core.ports import Tally


class Way(Protocol):
    """`Link` is one, `replicas.deployment.Alone` another."""

    closed: asyncio.Event

    def tell(self, records: bytes) -> None:
        """To everybody, if all of them are for everybody. Never waits, as `send`."""

    def send(self, address: int, records: bytes) -> None: ...

    def close(self) -> None:
        """What was said still goes out; wait for `closed`."""


class Uplink(Protocol):
    """The other hosts, as a host sees them; `Deployment` is one."""

    def say(self, member: int, batch: bytes) -> None:
        """To all of them."""

    def answer(self, number: int, member: int, batch: bytes) -> None:
        """To the host of that number."""

    def joined(self, is_first: bool) -> None:
        """A member has to be told all that is in flight; the first one, what is remembered too."""

    def left(self, member: int) -> None: ...


class Local(Protocol):
    """A host, as the others see it; `Hub` and `replicas.replica.Replica` are such."""

    @property
    def members(self) -> list[int]: ...

    def heard(self, number: int, batch: bytes) -> None:
        """From a member of another host."""

    def gone(self, number: int) -> None:
        """A member of another host is no more, and with it all that it had in flight."""

    def ask(self, to: int, memory: float) -> None:
        """All members tell what they have in flight; and one of them the latest part of what it remembers, 1.0: all."""


log = logging.getLogger(__name__)

BACKLOG = 8 * 1024 * 1024
"""Bytes that wait for a reader who is slow; beyond it the oldest frames are dropped."""

_BUFFER = 256 * 1024


class Link(asyncio.Protocol):
    """`received(address, records)` for every frame, `lost()` once when the other side is gone, `missed()` when the
    reader has caught up after frames were dropped: only a snapshot helps then."""

    def __init__(
        self,
        received: Callable[[int, bytes], None],
        lost: Callable[[], None],
        missed: Callable[[], None],
        dropped: Tally,
        backlog: int = BACKLOG,
    ) -> None:
        self._received = received
        self._lost = lost
        self._missed = missed
        self._dropped = dropped
        self._backlog = backlog
        self._frames = Frames()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._gap = False
        self._is_over = False
        """Nothing more is said."""
        self._transport: asyncio.Transport
        self.closed = asyncio.Event()

    @classmethod
    async def over(cls, sock: socket.socket, *arguments: object) -> Link:
        """A link over a connected socket; the arguments are those of the class."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(*arguments), sock=sock)  # type: ignore[arg-type]
        return link

    def tell(self, records: bytes) -> None:
        self.send(EVERYBODY, records)

    def send(self, address: int, records: bytes) -> None:
        """Never waits."""
        data = frame(address, records)
        if not self._paused:
            self._transport.write(data)
            return
        if self._is_over:
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > self._backlog:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._dropped.add(1)
            self._gap = True

    def close(self) -> None:
        """What was said goes out, and the other side hangs up when it has heard it; wait for `closed`. If this side
        did, what the other one writes just then would fail there, before it has read the rest."""
        if self._is_over:
            return
        self._is_over = self._paused = True
        self._transport.writelines(self._waiting)
        self._waiting.clear()
        self._transport.write_eof()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER)

    def data_received(self, data: bytes) -> None:
        try:
            for address, records in self._frames.feed(data):
                self._received(address, records)
        except Garbled as error:
            log.error("the bus is garbled, its link is cut: %s", error)
            self.abort()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        if self._is_over:
            return
        self._paused = False
        while self._waiting and not self._paused:
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._transport.write(data)
        if self._gap and not self._waiting:
            self._gap = False
            self._missed()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = self._paused = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self.closed.set()
        self._lost()


INTERVAL = 0.005
"""Seconds. Two requests that reach two workers within it do not know of each other."""

AT_ONCE, LITTLE = 0.001, 40
"""Seconds that are enough for what is said of one event, and bytes that are about that."""

ENOUGH = 250
"""Bytes that are gathered, some four requests: at less, what a batch costs by itself is more than what is in it."""

LATER = 0.1
"""Seconds that may pass, between hosts, until it is told which blocks are where, and that a pod has less to do: most of
what a batch costs is the index, and who hears of that so late places requests as well."""

PATIENCE = 5.0
"""Intervals that a batch between hosts may be gathered for, to have more in it."""

NEWS = 0.1
"""Seconds that news from a worker of one host to that of another takes at most."""

SMOOTH = 0.1
"""The part of what was said between two batches with all there is in what is known of how much there is to say."""

_NEVER = -math.inf


def _nothing() -> bytes:
    return b""


def _to_nobody(batch: bytes) -> None:
    """As long as there is no way."""


class Outbox:
    """Records stand behind what `urgent()` gives, which is gathered for as long as they are, and `rest()`, which may
    wait; b"" for none.

    `interval` is how long a batch is gathered, `patience` by how many times that may be stretched to have enough in it.
    Where even that would not do, it is not stretched: with so little to say, what batches cost is little too. And where
    nothing more would come within it either, nobody is made to wait for it. `later` is how long the rest may wait; it
    goes with a batch after which there would be none before that time is over, and with each where there is little to
    say.
    """

    def __init__(self, send: Callable[[bytes], None] = _to_nobody, rest: Callable[[], bytes] = _nothing) -> None:
        self.send = send
        self.urgent: Callable[[], bytes] = _nothing
        self._rest = rest
        self.pace()
        self._records: list[bytes] = []
        self._soon: asyncio.TimerHandle | None = None
        """When records and what is urgent go out; `_late`: all there is, at `_late_at`."""
        self._late: asyncio.TimerHandle | None = None
        self._late_at = math.inf

    def pace(self, interval: float = INTERVAL, patience: float = 1.0, later: float = INTERVAL) -> None:
        self._later = later
        self._shortest, self._longest = interval, interval * patience
        self._interval = self._near = interval
        """What may wait goes with a batch if no more than `_near` is left of its time."""
        self._size = 0
        """Bytes since `_sent_at`, by the clock of the loop, when all there was went out; and how many a second."""
        self._rate, self._sent_at = 0.0, _NEVER

    def add(self, kind: Kind, body: bytes) -> None:
        self._records.append(record(kind, body))
        self.touch()

    def touch(self) -> None:
        """There is something to send soon."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_at(loop.time() + self._interval, self._send_soon)

    def touch_later(self) -> None:
        """There is something to send that may wait."""
        if self._later <= self._interval:
            self.touch()
        elif self._late is None:
            loop = asyncio.get_running_loop()
            self._late_at = loop.time() + self._later
            self._late = loop.call_at(self._late_at, self.flush)

    def flush(self) -> None:
        """Sends at once what there is."""
        self._cancel()
        self._send(self.urgent() + self._rest())
        if self._size and self._longest > self._shortest:
            self._follow(self._size, asyncio.get_running_loop().time())
            self._size = 0

    def close(self) -> None:
        """Drops what was not sent."""
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

    def _follow(self, size: int, now: float) -> None:
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


SNAPSHOT_FRAME = 4 * 1024 * 1024
"""Bytes after which a snapshot goes on in another frame."""

Take = Callable[[int, Kind, bytes], None]


class Hub:
    """`everything()` gives the records that a joining worker must have before it serves; `take(worker, kind, body)`
    gets what workers say; `vanished(worker)` is called when one is gone."""

    def __init__(
        self,
        everything: Callable[[], Iterable[tuple[Kind, bytes]]],
        take: Take,
        vanished: Callable[[int], None],
        dropped: Tally,
        garbled: Tally,
        *,
        shares: bool = True,
    ) -> None:
        """Where nothing is shared, workers hear of the pods and not of each other."""
        self._everything = everything
        self._take = take
        self._vanished = vanished
        self._dropped = dropped
        self._garbled = garbled
        self._shares = shares
        self._links: dict[int, Link] = {}
        self.uplink: Uplink | None = None
        """To the other hosts, where there are any; whoever has one sets it."""
        self._outbox = Outbox(self._to_all)
        self.tell = self._outbox.add
        """Soon, to all workers."""

    async def attach(self, worker: int, sock: socket.socket) -> None:
        """A worker that joins: no two ever have the same number."""
        link = await Link.over(
            sock,
            lambda address, batch: self._received(worker, address, batch),
            lambda: self._lost(worker),
            lambda: self._catch_up(worker),
            self._dropped,
        )
        if link.closed.is_set():
            self._vanished(worker)
            return
        self._links[worker] = link
        self._catch_up(worker)

    def close(self) -> None:
        self._outbox.close()
        for link in list(self._links.values()):
            link.abort()

    # What other hosts say.

    @property
    def members(self) -> list[int]:
        return list(self._links)

    def heard(self, number: int, batch: bytes) -> None:
        for link in self._links.values():
            link.send(number, batch)
        self._hear(number, batch)

    def gone(self, number: int) -> None:
        self.tell(Kind.VANISHED, number.to_bytes(4, "little"))
        self._outbox.flush()
        self._vanished(number)

    def ask(self, to: int, memory: float) -> None:
        self._ask(list(self._links.values()), to, memory)

    # Below: how.

    def _received(self, worker: int, address: int, batch: bytes) -> None:
        if address == EVERYBODY:
            if self._shares:
                for other, link in self._links.items():
                    if other != worker:
                        link.send(worker, batch)
            if self.uplink is not None:
                self.uplink.say(worker, batch)
            self._hear(worker, batch)
        elif address == HUB:
            self._hear(worker, batch)
        elif (to := self._links.get(address)) is not None and self._shares:
            to.send(worker, batch)
        elif self.uplink is not None:
            self.uplink.answer(address, worker, batch)

    def _hear(self, worker: int, batch: bytes) -> None:
        try:
            for kind, body in records(batch):
                self._take(worker, kind, body)
        except UNREADABLE as error:
            self._garbled.add()
            log.error("dropped a message of worker %d: %s: %s", worker, type(error).__name__, error)

    def _catch_up(self, worker: int) -> None:
        """What waits in the outbox is told first: it is older than the snapshot. One of the others is asked for what
        all of them remember, each for what it has in flight."""
        self._outbox.flush()
        self._tell_everything(self._links[worker])
        if not self._shares:
            return
        self._ask([link for other, link in self._links.items() if other != worker], worker, 1.0)
        if self.uplink is not None:
            self.uplink.joined(is_first=len(self._links) == 1)

    def _tell_everything(self, link: Link) -> None:
        """In several frames, as each has a largest size."""
        batch, size = list[bytes](), 0
        for kind, body in self._everything():
            batch.append(record(kind, body))
            size += len(body)
            if size >= SNAPSHOT_FRAME:
                link.send(HUB, b"".join(batch))
                batch, size = [], 0
        link.send(HUB, b"".join(batch))

    def _ask(self, links: Sequence[Link], to: int, memory: float) -> None:
        for position, link in enumerate(links):
            asked = {"to": to, "memory": 0.0 if position else memory}
            link.send(HUB, record(Kind.SNAPSHOT, orjson.dumps(asked)))

    def _lost(self, worker: int) -> None:
        if self._links.pop(worker, None) is None:
            return
        if self._shares:
            self.tell(Kind.VANISHED, worker.to_bytes(4, "little"))
            self._outbox.flush()
        if self.uplink is not None:
            self.uplink.left(worker)
        self._vanished(worker)

    def _to_all(self, batch: bytes) -> None:
        for link in self._links.values():
            link.send(HUB, batch)
