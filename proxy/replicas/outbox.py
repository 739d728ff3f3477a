"""Collects what is to be said for some milliseconds, so that a busy process sends batches and not every event."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from proxy.replicas.wire import Kind, record

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
