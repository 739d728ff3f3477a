"""Writers of lines: to a pipe that may block, to standard error, to a rotating file."""

from __future__ import annotations

import atexit
import fcntl
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Self

log = logging.getLogger(__name__)

BACKLOG = 16 * 1024 * 1024
"""Bytes that may wait for a slow reader; further lines are dropped and counted."""

STOP_TIMEOUT = 2.0
"""Seconds that a stopping process waits for the reader to read the rest."""


class LineWriter:
    """A queue of lines and a thread that writes them; an `async with` context. `write` receives whole lines, may block,
    and raises OSError or ValueError if it could not write them: the first of consecutive failures is logged, and their
    lines are counted as lost."""

    # Not a buffered stream: if its reader stood still when the process ends, the interpreter would abort over its lock.
    def __init__(self, name: str, write: Callable[[bytes], None], lost: Callable[[int], None]) -> None:
        """`name` is the name in log messages, such as "the access log". `lost` is called with the number of lines that
        were dropped or could not be written."""
        self._name = name
        self._write = write
        self._lost = lost
        self._batches: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued = 0
        self._taken = 0
        self._dropped = 0
        self._lock = threading.RLock()  # reentrant: a finaliser that runs under it may write to standard error
        self._thread = threading.Thread(target=self._write_batches, name=name, daemon=True)

    @property
    def is_behind(self) -> bool:
        """Return whether more lines must be dropped."""
        return self._queued - self._taken > BACKLOG

    def put(self, batch: bytes) -> None:
        size = len(batch)
        with self._lock:
            self._queued += size
            self._batches.put(batch)

    def drop(self, lines: int) -> None:
        """Count lines that are dropped because the writer is too far behind."""
        with self._lock:
            self._dropped += lines
            self._lost(lines)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Write the queued lines, for at most `STOP_TIMEOUT`. Return whether all of them were written."""
        self._batches.put(None)
        self._thread.join(STOP_TIMEOUT)
        return not self._thread.is_alive()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Write everything, unless the reader stopped reading."""
        import asyncio  # here: the processes for large bodies use `stop` alone, and are 7 MB smaller without it

        await asyncio.to_thread(self.stop)

    def _write_batches(self) -> None:
        """Write batches, in the thread: only this method changes `_taken`."""
        broken = False
        while (batch := self._batches.get()) is not None:
            try:
                self._write(batch)
                broken = False
            except (OSError, ValueError) as error:  # the reader is gone, or the stream is closed
                with self._lock:
                    self._lost(batch.count(b"\n"))
                if not broken:
                    log.warning("failed to write %s; dropping its lines: %s", self._name, error)
                broken = True
            self._taken += len(batch)
            if self._dropped and self._queued - self._taken <= BACKLOG // 2:
                with self._lock:
                    dropped, self._dropped = self._dropped, 0
                log.warning("%s was not read fast enough: dropped %d lines", self._name, dropped)


def write_all(write_some: Callable[[bytes], int], data: bytes) -> None:
    """Write with a function that writes a part of the bytes, as `os.write` does."""
    while data:
        data = data[write_some(data) :]


class StandardError(io.TextIOBase):
    """A text stream whose writes are queued for a thread, and dropped and counted while the queue is full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost_lines = 0
        self._descriptor = descriptor
        write = partial(write_all, partial(os.write, descriptor))
        self._writer = LineWriter("standard error", write, self._count)
        self._writer.start()

    encoding = "utf-8"
    errors = "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        batch = text.encode(self.encoding, self.errors)
        if self._writer.is_behind:
            self._writer.drop(text.count("\n"))
        elif batch:
            self._writer.put(batch)
        return len(text)

    def stop(self) -> bool:
        """Write the queued text, for at most `STOP_TIMEOUT`. Return whether all of it was written."""
        return self._writer.stop()

    def _count(self, lines: int) -> None:
        self.lost_lines += lines


def guard_standard_error() -> None:
    """Replace `sys.stderr` until the process ends: log messages, warnings and tracebacks all go through it."""
    original, stream = sys.stderr, StandardError(sys.stderr.fileno())
    original.flush()
    sys.stderr = stream

    def stop() -> None:
        if stream.stop() and sys.stderr is stream:
            sys.stderr = original  # its reader reads, and the thread has ended

    atexit.register(stop)


def flush_standard_error() -> None:
    """Write the queued text before the process ends without its exit handlers."""
    if isinstance(sys.stderr, StandardError):
        sys.stderr.stop()


def lost_lines() -> int:
    """Return how many lines this process has dropped or could not write."""
    return sys.stderr.lost_lines if isinstance(sys.stderr, StandardError) else 0


MODE = 0o600


class RotatingFile:
    """A file that rotates. One thread of each process uses it; `lock` is a file that all of them can open. `head`
    returns the first lines of a new file, before the lines to write. A full file is renamed to `PATH.1`, the previous
    one to `PATH.2`, up to `keep`; the oldest is removed."""

    def __init__(self, path: Path, lock: Path, max_size: int, keep: int, head: Callable[[bytes], bytes]) -> None:
        self._path = path
        self._lock = lock
        self._max_size = max_size
        self._keep = keep
        self._head = head

    def write(self, lines: bytes) -> None:
        """Write all lines or none, so that a reader finds whole lines. Raise OSError.

        The file is opened every time, because it may have been moved or removed since."""
        with _opened(self._lock, os.O_RDWR) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _size_of(self._path) + len(lines) > self._max_size:
                self._rotate()
            with _opened(self._path, os.O_RDWR | os.O_APPEND) as descriptor:
                size = os.fstat(descriptor).st_size
                is_partial = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                before = b"\n" * is_partial if size else self._head(lines)
                try:
                    write_all(partial(os.write, descriptor), before + lines)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise

    def _rotate(self) -> None:
        numbered = (self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._keep + 1))
        names = [self._path, *numbered]
        names[-1].unlink(missing_ok=True)
        for at in range(len(names) - 1, 0, -1):
            if names[at - 1].exists():
                names[at - 1].rename(names[at])


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, MODE)
    try:
        os.fchmod(descriptor, MODE)
        yield descriptor
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
