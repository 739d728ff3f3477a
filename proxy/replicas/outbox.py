"""Collects records for a few milliseconds, so that a busy process sends a batch and not a message per event."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from proxy.replicas.wire import Kind, record

INTERVAL = 0.005
"""Seconds. Two requests that reach two workers within it do not know of each other."""

AT_ONCE, LITTLE = 0.001, 40
"""Seconds that are enough for what is said of one event, and bytes that are about that."""

ENOUGH = 400
"""Bytes of a batch, some four requests: at less, what a batch costs by itself is more than what is in it."""

LATER = 0.025
"""Seconds that ends of requests may wait, between hosts, for something that is to be told soon: most of them go with
the next dispatch then. Who hears so late that a pod has less to do loses nothing that could be measured."""

SMOOTH = 0.1
"""The part of a batch in what is known of how much there is to say."""


class Outbox:
    """`extra()` gives records that stand before all others of a batch; b"" for none.

    `interval` is how long a batch is gathered, `patience` by how many times that may be stretched to have enough in it.
    Where even that would not do, it is not stretched: with so little to say, what batches cost is little too. And where
    nothing more would come within it either, nobody is made to wait for it. `later` is how long news may wait of which
    that was said.
    """

    def __init__(self, send: Callable[[bytes], None], extra: Callable[[], bytes] = bytes) -> None:
        self._send = send
        self._extra = extra
        self.pace()
        self._records: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_soon = False
        """Whether the timer is that of something that is not to wait."""

    def pace(self, interval: float = INTERVAL, patience: float = 1.0, later: float = INTERVAL) -> None:
        self._later = later
        self._shortest, self._longest = interval, interval * patience
        self._interval = interval
        self._rate, self._sent_at = 0.0, -math.inf
        """Bytes per second; and when the last batch went out, by the clock of the loop."""

    def add(self, kind: Kind, body: bytes) -> None:
        self._records.append(record(kind, body))
        if not self._is_soon:
            self.touch()

    def touch(self) -> None:
        """There is something to send soon."""
        if self._is_soon:
            return
        loop, self._is_soon = asyncio.get_running_loop(), True
        due = loop.time() + self._interval
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self.flush)

    def touch_later(self) -> None:
        """There is something to send that may wait."""
        if self._timer is None:
            wait = max(self._interval, self._later)
            self._timer = asyncio.get_running_loop().call_later(wait, self.flush)

    def flush(self) -> None:
        """Sends at once what there is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._is_soon = None, False
        batch = self._extra() + b"".join(self._records)
        self._records.clear()
        if batch:
            if self._longest > self._shortest:
                self._follow(len(batch), asyncio.get_running_loop().time())
            self._send(batch)

    def _follow(self, size: int, now: float) -> None:
        self._rate += SMOOTH * (size / max(self._shortest, now - self._sent_at) - self._rate)
        self._sent_at = now
        if self._rate * self._shortest < LITTLE:
            self._interval = min(self._shortest, AT_ONCE)
        elif self._rate * self._longest >= ENOUGH:
            self._interval = max(self._shortest, ENOUGH / self._rate)
        else:
            self._interval = self._shortest

    def close(self) -> None:
        """Drops what was not sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._is_soon = None, False
        self._records.clear()
