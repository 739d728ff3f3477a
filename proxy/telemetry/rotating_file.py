"""A file of lines for the eyes of its owner, which several processes write and which makes room when it is full."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MODE = 0o600


class RotatingFile:
    """Used by one thread of each process; `lock` is a file that all of them may open. `head` gives the lines that a new
    file begins with. A full one becomes `PATH.1`, that one `PATH.2`, up to `keep`; the oldest goes."""

    def __init__(self, path: Path, lock: Path, max_size: int, keep: int, head: Callable[[], bytes]) -> None:
        self._path = path
        self._lock = lock
        self._max_size = max_size
        self._keep = keep
        self._head = head

    def write(self, lines: bytes) -> None:
        """All of them or none: raises OSError, and whoever reads the file finds whole lines.

        The file is opened every time, because it may have been moved or removed since."""
        with _opened(self._lock, os.O_RDWR) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _size_of(self._path) + len(lines) > self._max_size:
                self._make_room()
            with _opened(self._path, os.O_RDWR | os.O_APPEND) as descriptor:
                _append(descriptor, lines, self._head)

    def _make_room(self) -> None:
        numbered = (self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._keep + 1))
        names = [self._path, *numbered]
        names[-1].unlink(missing_ok=True)
        for at in range(len(names) - 1, 0, -1):
            if names[at - 1].exists():
                names[at - 1].rename(names[at])


def _append(descriptor: int, lines: bytes, head: Callable[[], bytes]) -> None:
    size = os.fstat(descriptor).st_size
    is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    left = (b"\n" * is_cut if size else head()) + lines
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


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
