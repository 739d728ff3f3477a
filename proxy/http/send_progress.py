"""Detection of clients that do not read what is sent to them."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from typing import Any

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset and drops what the kernel still holds."""

_BYTES_ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` in the kernel's `struct tcp_info`."""


class SendProgress:
    """Progress of one connection whose client has bytes to read, measured at each sweep.

    Linux counts the bytes that the client's kernel has acknowledged. Elsewhere the write buffer has to shrink, which
    under TLS is visible only each time that it is emptied.
    """

    __slots__ = ("_moved_at", "_sent", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._sent = 0
        self._moved_at: float | None = None

    def stalled_for(self, now: float) -> float:
        """Seconds since the client last took a byte; 0 if no byte waits for it. `now` is monotonic seconds."""
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._moved_at = None
            return 0.0
        sent = _acknowledged(self.transport.get_extra_info("socket"))
        if sent is None:
            sent = -waiting
        if self._moved_at is None or sent > self._sent:
            self._moved_at = now
        self._sent = sent
        return now - self._moved_at


def reset(transport: asyncio.Transport) -> None:
    """Close with a reset and drop what was not sent: after an orderly close, an answer that ends with the connection
    would look whole."""
    sock = transport.get_extra_info("socket")
    is_open = not transport.is_closing() or transport.get_write_buffer_size()  # a closed one may be another's by now
    if sock is not None and is_open:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


def _acknowledged(sock: Any) -> int | None:
    """None where the kernel does not count it."""
    if sock is None or sys.platform != "linux":
        return None
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    except OSError:
        return None
    acknowledged: int | None = _BYTES_ACKED.unpack(info)[0] if len(info) == _BYTES_ACKED.size else None
    return acknowledged
