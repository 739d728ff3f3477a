"""Files that are read again when they have changed, and the limit on open files."""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from proxy.core.errors import Unreadable
from proxy.core.log_limit import LogLimit

log = logging.getLogger(__name__)


T = TypeVar("T")

Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Reports when files must be read again. A change counts once two checks in a row have seen the same files, so that
    no file is read while it is being written. Without `waits_for_writer` it counts at once if all files exist. Files
    that could not be read are read at each check until they can be, because they may become readable without a change:
    a file descriptor becomes free."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], waits_for_writer: bool = True) -> None:
        self.paths = paths
        """A loader may change it if the content of a file names others."""
        self._waits_for_writer = waits_for_writer
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
        """Return what `load` returns if a file has changed and its writer has finished, or was never read; None
        otherwise. Raise what `load` raises, but the same Unreadable only once in a row."""
        before, self._seen = self._seen, self._stamp()
        counts = before in (None, self._seen) if self._waits_for_writer else None not in self._seen
        if self._seen == self._read or not counts:
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

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp, self.paths))


def _stamp(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_ctime_ns, stat.st_ino, stat.st_size  # ctime: a corrected mode counts, too


CANNOT_CONNECT, CANNOT_ACCEPT = "connect", "accept"

RESERVED_FILES = 16
"""Descriptors below the limit that no client's connection gets, so that connections to pods and files can be opened."""

out_of_files: Counter[str] = Counter({CANNOT_CONNECT: 0, CANNOT_ACCEPT: 0})
"""Connections that failed at the limit, by what was tried. Shown in kvlane_open_files_limit_reached_total."""

_logs = LogLimit()


def open_files_limit() -> int:
    """Return the most descriptors that this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard limit, which child processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("could not raise the limit on open files from %d to %d: %s", soft, hard, error)


def warn_of_few_files(max_connections: int, level: int = logging.WARNING) -> None:
    """Log if the limit is too low for two descriptors per client: its connection and the one to its pod."""
    most, wanted = open_files_limit(), 2 * max_connections + RESERVED_FILES
    if most < wanted:
        log.log(
            level,
            "the limit on open files is %d, too low for listen.maxConnections (%d); raise the hard limit to %d"
            " (ulimit -Hn, LimitNOFILE) or lower listen.maxConnections",
            most,
            max_connections,
            wanted,
        )


def files_limit_of(error: Exception) -> int:
    """Return EMFILE if `error` says that the process has no descriptor left, ENFILE if the machine has none; else 0.

    A resolver that could not open a socket only says that the name was not found, so a descriptor is tried then."""
    if not isinstance(error, OSError):
        return 0
    code = error.errno
    if code is None or code < 0:  # as in socket.gaierror
        code = _tried()
    return code if code in (errno.EMFILE, errno.ENFILE) else 0


def report_out_of_files(what: str, code: int = errno.EMFILE) -> str:
    """Count a connection that failed at the limit, and log it once a minute. Return the limit that was reached: of the
    process, or with ENFILE of the machine."""
    limit = f"the limit on open files is {open_files_limit()}"
    advice = "raise the limit (ulimit -Hn, LimitNOFILE) or lower listen.maxConnections"
    if code == errno.ENFILE:
        limit = "all processes of the machine together have reached its limit on open files"
        advice = "raise the limit (sysctl fs.file-max) or find the process that opens so many"
    out_of_files[what] += 1
    if _logs.allows(code):
        failed = "accept a client's connection" if what == CANNOT_ACCEPT else "connect to a pod"
        log.error("out of file descriptors: %s; cannot %s; %s", limit, failed, advice)
    return limit


def _tried() -> int:
    """Return the error number of opening a file; 0 if that succeeds."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno or 0
    return 0
