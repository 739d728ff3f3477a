"""Whole lines from several processes into one stream."""

from __future__ import annotations

import fcntl
import os


class LockedWriter:
    """Writes all of a batch of lines before another process begins with its own: a pipe would mix batches that are
    longer than 4 KB. The lock is that of a file, so a process that is killed gives it back."""

    def __init__(self, path: str, stream: int) -> None:
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._stream = stream

    def __call__(self, batch: bytes) -> int:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            rest = memoryview(batch)
            while rest:
                rest = rest[os.write(self._stream, rest) :]
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        return len(batch)
