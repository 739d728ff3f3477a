"""What can go wrong on a connection to a pod."""

from __future__ import annotations

from proxy.core import open_files
from proxy.core.errors import ConnectFailed, ConnectRefused, OutOfFiles, UpstreamFailed


class Garbled(UpstreamFailed):
    """What the pod sent is not HTTP."""


class Disconnected(UpstreamFailed):
    """The pod closed the connection before its answer was whole. `silent`: before a byte of it."""

    broke_off = True

    def __init__(self, message: str, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


def not_connected(error: OSError | ValueError, now: float) -> ConnectFailed:
    """Return the failure to raise for an error of connecting to a pod, or of looking up its name. `now` is monotonic
    seconds."""
    if open_files.is_shortage(error):
        open_files.report(open_files.CONNECT, now)
        return OutOfFiles(f"no connection: out of file descriptors, of which {open_files.limit()} are allowed")
    failure = ConnectRefused if isinstance(error, ConnectionRefusedError) else ConnectFailed
    return failure(f"no connection: {error}")
