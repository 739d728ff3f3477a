"""The limit on open files of this process: raise it at the start, and report when it is reached."""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
from collections import Counter

log = logging.getLogger(__name__)

CONNECT, ACCEPT = "connect", "accept"

LOGGED_EVERY = 60.0
"""Seconds between two log lines that say that the limit is reached."""

RESERVED = 16
"""Descriptors below the limit that no client's connection gets, so that connections to pods and files can be opened."""

reached: Counter[str] = Counter({CONNECT: 0, ACCEPT: 0})
"""Connections that failed at the limit, by what was tried. Shown in kvlane_open_files_limit_reached_total."""

_logged_at = float("-inf")


def limit() -> int:
    """Return the most descriptors that this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, which child processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("could not raise the limit on open files from %d to %d: %s", soft, hard, error)


def warn_if_low(max_connections: int) -> None:
    """Log a warning if the limit is too low for two descriptors per client: its connection and the one to its pod."""
    most, wanted = limit(), 2 * max_connections + RESERVED
    if most < wanted:
        log.warning(
            "the limit on open files is %d, too low for listen.maxConnections (%d); raise the hard limit to %d"
            " (ulimit -Hn, LimitNOFILE) or lower listen.maxConnections",
            most,
            max_connections,
            wanted,
        )


def is_shortage(error: Exception) -> bool:
    """Return whether `error` says that the process or the machine has no descriptor left.

    A resolver that could not open a socket only says that the name was not found, so a descriptor is tried then."""
    if not isinstance(error, OSError):
        return False
    if error.errno is None or error.errno < 0:  # as in socket.gaierror
        return _none_left()
    return error.errno in (errno.EMFILE, errno.ENFILE)


def report(what: str, now: float) -> None:
    """Count a connection that failed at the limit, and log it once a minute. `now` is monotonic seconds."""
    global _logged_at
    reached[what] += 1
    if now - _logged_at < LOGGED_EVERY:
        return
    _logged_at = now
    log.error(
        "out of file descriptors: the limit on open files is %d; cannot %s; raise the limit (ulimit -Hn, LimitNOFILE)"
        " or lower listen.maxConnections",
        limit(),
        "accept a client's connection" if what == ACCEPT else "connect to a pod",
    )


def _none_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
