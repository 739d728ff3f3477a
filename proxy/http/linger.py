"""What follows an answer that came before its request was read: the client is let finish, and nobody listens."""

from __future__ import annotations

import asyncio

LINGER = 5.0
LINGER_BYTES = 64 * 1024 * 1024
"""How long, and how much, such a client may go on sending."""


class Lingering:
    """Closing while the client still sends would reset the connection, and take the answer with it: so one half is
    closed, and what still comes is dropped until the client has closed the other. TLS has no halves to close."""

    __slots__ = ("_left", "_since", "_socket")

    def __init__(self, socket: asyncio.Transport) -> None:
        self._socket = socket
        self._left = LINGER_BYTES
        self._since: float | None = None
        if socket.can_write_eof():
            try:
                socket.write_eof()
            except OSError:  # the client has left while nothing was read from it
                socket.abort()

    def feed(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._socket.abort()

    def check(self, now: float) -> None:
        """For the sweep. `now` is monotonic seconds."""
        if self._since is None:
            self._since = now
        elif now - self._since > LINGER:
            self._socket.abort()
