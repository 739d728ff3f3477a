"""Files that are read again when they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from proxy.core.errors import Unreadable

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Report when files have to be read again.

    A change counts once two looks in a row have seen the same files, so that nothing is read while it is still being
    written. Without `settles` it counts at once, except that a file is missing. Files that could not be read are read
    at each look until they can: free file descriptors change nothing of a file."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], settles: bool = True) -> None:
        self.paths = paths
        """May be changed by a loader, if the content of a file names others."""
        self._settles = settles
        self._seen: Stamp | None = None
        self._read: Stamp | None = None
        self._unreadable = ""
        """The error of the last read if it was Unreadable."""

    def read(self, load: Callable[[], T]) -> T:
        """Return what `load` returns, whether or not a file has changed. Raise what `load` raises; after Unreadable the
        next look reads again."""
        self._seen = self._read = self._stamp()  # before reading: what is written from here on is a change
        try:
            loaded = load()
        except Unreadable:
            self._read = None
            raise
        self._unreadable = ""
        return loaded

    def read_if_changed(self, load: Callable[[], T]) -> T | None:
        """Return what `load` returns if a file has changed and settled, or was never read; None otherwise. Raise what
        `load` raises, but the same Unreadable only once in a row."""
        before, self._seen = self._seen, self._stamp()
        if self._seen == self._read or not self._counts(before, self._seen):
            return None
        try:
            return self.read(load)
        except Unreadable as error:
            if str(error) == self._unreadable:
                return None
            self._unreadable = str(error)
            raise
        except Exception:
            self._unreadable = ""
            raise

    def _counts(self, before: Stamp | None, seen: Stamp) -> bool:
        return before in (None, seen) if self._settles else None not in seen

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp, self.paths))


def _stamp(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_ctime_ns, stat.st_ino, stat.st_size  # ctime: a corrected mode counts, too
