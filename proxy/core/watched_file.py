"""A file that is read again when its content has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from proxy.core.errors import Unreadable

T = TypeVar("T")

Stamp = tuple[int, ...]


class WatchedFile:
    """Tells when a file has to be read again. A change counts once two looks in a row have seen the same file, so that
    nothing is read while somebody is still writing it. A file that could not be read is read at each look until it can:
    a mode that is corrected and descriptors that are free again change nothing of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._seen: Stamp | None = None
        self._read: Stamp | None = None

    def read(self, load: Callable[[], T]) -> T:
        """Return what `load` returns, whether or not the file has changed. Raises what `load` raises; after Unreadable
        the next look reads again."""
        self._seen = self._read = self._stamp()  # before reading: what is written from here on is a change
        try:
            return load()
        except Unreadable:
            self._read = None
            raise

    def read_if_changed(self, load: Callable[[], T]) -> T | None:
        """Return what `load` returns if the file has changed and settled, or was never read; None otherwise."""
        before, self._seen = self._seen, self._stamp()
        if self._seen == self._read or before not in (None, self._seen):
            return None
        return self.read(load)

    def _stamp(self) -> Stamp:
        try:
            stat = os.stat(self._path)
        except (OSError, ValueError):
            return ()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
