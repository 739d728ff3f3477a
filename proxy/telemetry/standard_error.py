"""Standard error that never blocks its writers, so that a reader that stands still cannot stop the event loop."""

from __future__ import annotations

import atexit
import io
import os
import sys

from proxy.telemetry.line_writer import LineWriter


class StandardError(io.TextIOBase):
    """A text stream whose writes are queued for a thread, and dropped and counted while the queue is full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost_lines = 0
        self._descriptor = descriptor
        self._writer = LineWriter("standard error", self._write_all, self._count)
        self._writer.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        batch = text.encode(self.encoding, self.errors)
        if self._writer.is_behind:
            self._writer.drop(text.count("\n"))
        elif batch:
            self._writer.hand(batch)
        return len(text)

    def stop(self) -> bool:
        """Write what is queued, for at most `line_writer.STOP_TIMEOUT`. Return whether all of it was written."""
        return self._writer.stop()

    def _write_all(self, batch: bytes) -> None:
        while batch:
            batch = batch[os.write(self._descriptor, batch) :]

    def _count(self, lines: int) -> None:
        self.lost_lines += lines


def install() -> None:
    """Replace `sys.stderr` until the process ends: log messages, warnings and tracebacks all go through it."""
    original, stream = sys.stderr, StandardError(sys.stderr.fileno())
    original.flush()
    sys.stderr = stream

    def stop() -> None:
        if stream.stop() and sys.stderr is stream:
            sys.stderr = original  # its reader reads, and the thread has ended

    atexit.register(stop)


def lost_lines() -> int:
    """Return how many lines this process has dropped or could not write."""
    return sys.stderr.lost_lines if isinstance(sys.stderr, StandardError) else 0
