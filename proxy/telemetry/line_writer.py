"""Lines that are written where nobody waits: handed over in batches, written in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

BACKLOG = 16 * 1024 * 1024
"""Bytes that wait for a slow reader; what comes on top is to be dropped and counted."""

STOP_TIMEOUT = 2.0
"""Seconds that a stopping process gives the reader to take what is left."""


class LineWriter:
    """`write` takes whole lines, may block, and raises OSError or ValueError if it could not write them: the first
    such failure in a row is logged, and their lines are counted as lost. Use as `async with`."""

    # Not a buffered stream: if its reader stood still when the process ends, the interpreter would abort over its lock.
    def __init__(self, name: str, write: Callable[[bytes], None], lost: Callable[[int], None]) -> None:
        """`name` is what the log calls it: "the access log". `lost` is called with the number of lines that were
        dropped or could not be written."""
        self._name = name
        self._write = write
        self._lost = lost
        self._batches: SimpleQueue[bytes | None] = SimpleQueue()
        self._handed = 0
        self._taken = 0
        self._dropped = 0
        self._lock = threading.RLock()  # reentrant: a finaliser that runs under it may write to standard error
        self._thread = threading.Thread(target=self._write_batches, name=name, daemon=True)

    @property
    def is_behind(self) -> bool:
        """Too far to be handed more."""
        return self._handed - self._taken > BACKLOG

    def hand(self, batch: bytes) -> None:
        size = len(batch)
        with self._lock:
            self._handed += size
            self._batches.put(batch)

    def drop(self, lines: int) -> None:
        """Count lines that are not handed over because the writer is too far behind."""
        with self._lock:
            self._dropped += lines
            self._lost(lines)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Write what was handed over, for at most `STOP_TIMEOUT`. Return whether all of it was written."""
        self._batches.put(None)
        self._thread.join(STOP_TIMEOUT)
        return not self._thread.is_alive()

    async def __aenter__(self) -> LineWriter:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything is written, unless nobody reads."""
        import asyncio  # here: the processes for large bodies use `stop` alone, and are 7 MB smaller without it

        await asyncio.to_thread(self.stop)

    def _write_batches(self) -> None:
        """In the thread: `_taken` is written here only."""
        broken = False
        while (batch := self._batches.get()) is not None:
            try:
                self._write(batch)
                broken = False
            except (OSError, ValueError) as error:  # the reader is gone, or the stream is closed
                with self._lock:
                    self._lost(batch.count(b"\n"))
                if not broken:
                    log.warning("%s cannot be written, its lines are lost: %s", self._name, error)
                broken = True
            self._taken += len(batch)
            if self._dropped and self._handed - self._taken <= BACKLOG // 2:
                self._report()

    def _report(self) -> None:
        """Log how many lines were dropped, once half of the backlog is written."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        log.warning("%s was not read fast enough: dropped %d lines", self._name, dropped)
