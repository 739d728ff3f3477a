"""Collects records for a few milliseconds, so that a busy process sends a batch and not a message per event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.replicas.wire import Kind, record

INTERVAL = 0.005
"""Seconds. Two requests that reach two workers within it do not know of each other."""


class Outbox:
    """`extra()` gives records that stand before all others of a batch; b"" for none."""

    def __init__(self, send: Callable[[bytes], None], extra: Callable[[], bytes] = bytes) -> None:
        self._send = send
        self._extra = extra
        self._records: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, kind: Kind, body: bytes) -> None:
        self._records.append(record(kind, body))
        if self._timer is None:
            self.touch()

    def touch(self) -> None:
        """There is something to send soon."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self.flush)

    def flush(self) -> None:
        """Sends at once what there is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = self._extra() + b"".join(self._records)
        self._records.clear()
        if batch:
            self._send(batch)

    def close(self) -> None:
        """Drops what was not sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._records.clear()
