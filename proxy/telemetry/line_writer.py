"""Lines that are written where nobody waits: handed over in batches, written in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from proxy.telemetry.instruments import Counter

log = logging.getLogger(__name__)

BACKLOG = 16 * 1024 * 1024
"""Bytes that wait for a slow reader; what comes on top is to be dropped and counted."""

STOP_TIMEOUT = 2.0
"""Seconds that a stopping process gives the reader to take what is left."""


class LineWriter:
    """`write` takes whole lines, may block, and raises OSError or ValueError if it could not write them: the first
    such failure in a row is logged, and their lines are counted as lost. Use as `async with`."""

    # Not a buffered stream: if its reader stood still when the process ends, the interpreter would abort over its lock.
    def __init__(self, name: str, write: Callable[[bytes], None], lost: Counter) -> None:
        """`name` is what the log calls it: "the access log"."""
        self._name = name
        self._write = write
        self._lost = lost
        self._batches: SimpleQueue[bytes | None] = SimpleQueue()
        self._handed = 0
        self._taken = 0
        self._thread = threading.Thread(target=self._write_batches, name=name, daemon=True)

    @property
    def is_behind(self) -> bool:
        """Too far to be handed more."""
        return self._handed - self._taken > BACKLOG

    def hand(self, batch: bytes) -> None:
        self._handed += len(batch)
        self._batches.put(batch)

    async def __aenter__(self) -> LineWriter:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything is written, unless nobody reads."""
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)

    def _write_batches(self) -> None:
        """In the thread: `_taken` is written here only, `_handed` on the event loop only."""
        broken = False
        while (batch := self._batches.get()) is not None:
            try:
                self._write(batch)
                broken = False
            except (OSError, ValueError) as error:  # the reader is gone, or the stream is closed
                self._lost.add(batch.count(b"\n"))
                if not broken:
                    log.warning("%s cannot be written, its lines are lost: %s", self._name, error)
                broken = True
            self._taken += len(batch)
