"""What can go wrong on a connection to a pod."""

from __future__ import annotations

from proxy.core.errors import UpstreamFailed


class Garbled(UpstreamFailed):
    """What the pod sent is not HTTP."""


class Disconnected(UpstreamFailed):
    """The pod closed the connection before its answer was whole. `silent`: before a byte of it."""

    broke_off = True

    def __init__(self, message: str, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent
