"""Messages between the processes of a host: a link from each worker to the broker, which the supervisor runs."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import orjson

from proxy.cluster.deployment import Deployment
from proxy.cluster.messages import (
    BROKER,
    EVERYBODY,
    OTHER_HOSTS,
    UNREADABLE,
    Frames,
    Garbled,
    Kind,
    frame,
    record,
    records,
    summary,
)
from proxy.cluster.questions import Questions
from proxy.core.log_limit import LogLimit
from proxy.telemetry.metrics import Counter

log = logging.getLogger(__name__)

BACKLOG = 8 * 1024 * 1024
"""Bytes that wait for a slow reader. Beyond them the oldest frames are dropped."""

SNAPSHOT_FRAME = 4 * 1024 * 1024
"""Bytes after which a snapshot continues in another frame."""

INTERVAL = 0.005
"""Seconds that a batch is gathered within a host."""

SOON = 0.002
"""Seconds after which others are sent, at the latest, that a long prompt was dispatched."""

AT_ONCE, LITTLE = 0.001, 40
"""Seconds that a batch is gathered while there is little to send: fewer bytes than this in an interval."""

ENOUGH = 250
"""Bytes that are worth a batch, some four requests: with fewer, the batch costs more than what is in it."""

LATER = 0.1
"""Seconds that prefixes, and what pods have less to do, may wait between hosts: they are most of the cost of a batch,
and placement does not get worse by it (`bench/hearsay.py`)."""

PATIENCE = 5.0
"""Intervals that a batch between hosts may be gathered to have more in it."""

NEWS = 0.1
"""Seconds that news from a worker of one host to a worker of another take at most."""

SMOOTH = 0.1
"""Weight of the latest interval in the mean rate of bytes."""

_NEVER = -math.inf


_BUFFER = 256 * 1024


class Transport(Protocol):
    """How a process reaches the others: a `Link` within a host, a `Deployment` between hosts. Both call a function for
    each message that arrives, which they are given when they are made."""

    @property
    def is_connected(self) -> bool: ...

    def publish(self, batch: bytes, to: int = EVERYBODY) -> None:
        """Send records to one process or to all. Never waits."""

    async def end(self) -> None:
        """Send what still waits, and close."""


class Link(asyncio.Protocol):
    """One connection between a worker and the broker: whole frames, and a bound on what waits for a slow reader.

    `received(address, batch)` is called for each frame; `lost()` once, when the other side is gone; `missed()` when the
    reader has caught up after frames were dropped: only a snapshot helps then.
    """

    def __init__(
        self,
        received: Callable[[int, bytes], None],
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
        self._frames = Frames()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_paused = False
        self._has_gap = False
        self._has_ended = False
        self._transport: asyncio.Transport
        self.closed = asyncio.Event()

    @classmethod
    async def over(cls, sock: socket.socket, *arguments: object) -> Link:
        """Return a link over a connected socket. The arguments are those of the class."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(*arguments), sock=sock)  # type: ignore[arg-type]
        return link

    @property
    def is_connected(self) -> bool:
        return not self._has_ended

    def publish(self, batch: bytes, to: int = EVERYBODY) -> None:
        data = frame(to, batch)
        if not self._is_paused:
            self._transport.write(data)
            return
        if self._has_ended:
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > self._backlog:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._dropped.add(1)
            self._has_gap = True

    async def end(self) -> None:
        """The other side hangs up when it has read everything. If this side did, a write of the other side just then
        would fail before it has read the rest."""
        if not self._has_ended:
            self._has_ended = self._is_paused = True
            self._transport.writelines(self._waiting)
            self._waiting.clear()
            self._transport.write_eof()
        await self.closed.wait()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER)

    def data_received(self, data: bytes) -> None:
        try:
            for address, batch in self._frames.feed(data):
                self._received(address, batch)
        except Garbled as error:
            log.error("closed the link to a process of this host: unreadable frame: %s", error)
            self.abort()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        if self._has_ended:
            return
        self._is_paused = False
        while self._waiting and not self._is_paused:
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._transport.write(data)
        if self._has_gap and not self._waiting:
            self._has_gap = False
            self._missed()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = self._is_paused = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self.closed.set()
        self._lost()


class Broker:
    """Passes messages between the workers of a host and, if there is a `deployment`, between them and other hosts.

    `snapshot()` returns the records that a new worker needs before it serves; `take(worker, kind, body)` is called for
    each record that a worker publishes; `vanished(worker)` when a worker is gone.
    """

    def __init__(
        self,
        snapshot: Callable[[], Iterable[tuple[Kind, bytes]]],
        take: Callable[[int, Kind, bytes], None],
        vanished: Callable[[int], None],
        dropped: Counter,
        garbled: Counter,
        *,
        shares: bool = True,
    ) -> None:
        """`shares`: whether workers receive each other's messages."""
        self._snapshot = snapshot
        self._take = take
        self._vanished = vanished
        self._dropped = dropped
        self._garbled = garbled
        self._shares = shares
        self._logs = LogLimit()
        self._links: dict[int, Link] = {}
        self._batch = Batch(self._to_all)
        self.publish = self._batch.add
        """Send a record to all workers, with the next batch."""
        self.deployment: Deployment | None = None
        """The other hosts. Set by the owner where there are any."""
        self.questions = Questions(self._send_at_once)

    async def attach(self, worker: int, sock: socket.socket, first: bytes = b"") -> None:
        """Connect a new worker, and send it `first` before anything else. Numbers of workers are never used again."""
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
        if first:
            link.publish(first, BROKER)
        self._catch_up(worker)

    async def close(self) -> None:
        await self.questions.close()
        self._batch.close()
        for link in list(self._links.values()):
            link.abort()

    # Called by the deployment.

    @property
    def members(self) -> list[int]:
        return list(self._links)

    def received(self, number: int, batch: bytes) -> None:
        """Pass on what a member of another host published."""
        for link in self._links.values():
            link.publish(batch, number)
        self._apply(number, batch)

    def gone(self, number: int) -> None:
        """A member of another host is gone, with all that it had in flight."""
        self.publish(Kind.VANISHED, number.to_bytes(4, "little"))
        self._batch.flush()
        self._vanished(number)

    def send_state(self, to: int, memory: float) -> None:
        """Have all members send what they have in flight, and one of them this part of what it remembers."""
        self._request_state(list(self._links.values()), to, memory)

    def _received(self, worker: int, address: int, batch: bytes) -> None:
        if address == EVERYBODY:
            if self._shares:
                for other, link in self._links.items():
                    if other != worker:
                        link.publish(batch, worker)
            if self.deployment is not None:
                self.deployment.publish(batch, member=worker)
            self._apply(worker, batch)
        elif address == BROKER:
            self._apply(worker, batch)
        elif (to := self._links.get(address)) is not None and self._shares:
            to.publish(batch, worker)
        elif self.deployment is not None:
            self.deployment.publish(batch, address, worker)

    def _apply(self, worker: int, batch: bytes) -> None:
        try:
            for kind, body in records(batch):
                if kind in Questions.KINDS:
                    self.questions.take(worker, kind, body)
                else:
                    self._take(worker, kind, body)
        except UNREADABLE as error:
            self._garbled.add()
            if self._logs.allows(type(error)):
                log.error("dropped a message of worker %d (logged once a minute): %s", worker, summary(error))

    def _catch_up(self, worker: int) -> None:
        """What waits in the batch is older than the snapshot, so it is sent first."""
        self._batch.flush()
        self._send_snapshot(self._links[worker])
        if not self._shares:
            return
        self._request_state([link for other, link in self._links.items() if other != worker], worker, 1.0)
        if self.deployment is not None:
            self.deployment.joined(is_first=len(self._links) == 1)

    def _send_snapshot(self, link: Link) -> None:
        batch, size = list[bytes](), 0
        for kind, body in self._snapshot():
            batch.append(record(kind, body))
            size += len(body)
            if size >= SNAPSHOT_FRAME:
                link.publish(b"".join(batch), BROKER)
                batch, size = [], 0
        link.publish(b"".join(batch), BROKER)

    def _request_state(self, links: Sequence[Link], to: int, memory: float) -> None:
        for position, link in enumerate(links):
            wanted = {"to": to, "memory": 0.0 if position else memory}
            link.publish(record(Kind.SNAPSHOT, orjson.dumps(wanted)), BROKER)

    def _lost(self, worker: int) -> None:
        if self._links.pop(worker, None) is None:
            return
        if self._shares:
            self.publish(Kind.VANISHED, worker.to_bytes(4, "little"))
            self._batch.flush()
        if self.deployment is not None:
            self.deployment.publish(record(Kind.RESET, b""), OTHER_HOSTS, worker)
        self.questions.forget(worker)
        self._vanished(worker)

    def _to_all(self, batch: bytes) -> None:
        for link in self._links.values():
            link.publish(batch, BROKER)

    def _send_at_once(self, worker: int, message: bytes) -> None:
        """After what waits for all workers: a reply must not overtake what it is about."""
        self._batch.flush()
        if (link := self._links.get(worker)) is not None:
            link.publish(message, BROKER)


def _nothing() -> bytes:
    return b""


def _to_nobody(batch: bytes) -> None:
    """There is no transport yet."""


class Batch:
    """Gathers records for a short while, so that a busy process sends batches and not every event.

    A batch is what `urgent()` returns and the records that were added; `rest()`, which may wait for `later` seconds,
    goes with the last batch before that time is over. A batch is gathered for `interval`, and up to `patience` times as
    long where that makes it worth its cost. Where so little is sent that no batch would be, it is not gathered at all.
    """

    def __init__(self, send: Callable[[bytes], None] = _to_nobody, rest: Callable[[], bytes] = _nothing) -> None:
        self.send = send
        self.urgent: Callable[[], bytes] = _nothing
        self._rest = rest
        self.pace()
        self._records: list[bytes] = []
        self._soon: asyncio.TimerHandle | None = None
        """When records and what is urgent are sent; `_late`: everything, at `_late_at`."""
        self._late: asyncio.TimerHandle | None = None
        self._late_at = math.inf

    def pace(self, interval: float = INTERVAL, patience: float = 1.0, later: float = INTERVAL) -> None:
        self._later = later
        self._shortest, self._longest = interval, interval * patience
        self._interval = self._near = interval
        """The rest goes with a batch if no more than `_near` seconds are left."""
        self._size = 0
        """Bytes since everything was last sent, at `_sent_at` by the clock of the loop; `_rate`: bytes per second."""
        self._rate, self._sent_at = 0.0, _NEVER

    def add(self, kind: Kind, body: bytes) -> None:
        self._records.append(record(kind, body))
        self.touch()

    def touch(self) -> None:
        """There is something to send soon."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_at(loop.time() + self._interval, self._send_soon)

    def touch_soon(self) -> None:
        """There is something to send within SOON, however long batches are gathered."""
        loop = asyncio.get_running_loop()
        if self._soon is not None:
            if self._soon.when() <= loop.time() + SOON:
                return
            self._soon.cancel()
        self._soon = loop.call_at(loop.time() + min(self._interval, SOON), self._send_soon)

    def touch_later(self) -> None:
        """There is something to send that may wait."""
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
            self._follow(self._size, asyncio.get_running_loop().time())
            self._size = 0

    def close(self) -> None:
        """Drop what was not sent."""
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
