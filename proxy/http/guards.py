"""Guards against connections and requests that stall, fail or never end."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from proxy.core.errors import BodyTimeout, HeadTimeout, HeadTooLarge, InvalidHttp
from proxy.core.ports import Clock

log = logging.getLogger(__name__)


class Watched(Protocol):
    def check(self, now: float) -> None:
        """End itself if it has stalled. `now` is monotonic seconds."""


class Sweep:
    """Checks all `watched` objects periodically. Their owners add and remove them."""

    def __init__(self, clock: Clock, shortest: float) -> None:
        """`shortest` is the shortest timeout to check, in seconds. A timeout is exceeded by one sweep at most, or by
        two if it counts from the last progress that a sweep has seen."""
        self.watched: set[Watched] = set()
        self._clock = clock
        self.shortest = shortest

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, max(0.02, self.shortest / 4)))
            self.check()

    def check(self) -> None:
        check_all(self.watched, self._clock.now())


def _log(watched: Watched, error: Exception) -> None:
    log.error("failed to check the timeouts of %r", watched, exc_info=error)


def check_all(watched: Iterable[Watched], now: float, on_error: Callable[[Any, Exception], None] = _log) -> None:
    """Check each object. Call `on_error` with an object whose check raised and its error; the others are still
    checked."""
    for each in tuple(watched):
        try:
            each.check(now)
        except Exception as error:  # noqa: BLE001  # logged by `on_error`
            on_error(each, error)


class Guarded(Protocol):
    def internal_error(self, error: Exception) -> None:
        """Handle a defect of kvlane: end the request and log the error once with the id of the request."""


P = ParamSpec("P")
B = TypeVar("B", bound=Guarded)


def guarded(callback: Callable[Concatenate[B, P], None]) -> Callable[Concatenate[B, P], None]:
    """Return the callback with its errors passed to `internal_error`. A callback that runs for each read of a stream
    handles errors itself: the wrapper costs more than its `try`."""

    @wraps(callback)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # `internal_error` logs it, or gives it to the task that does
            self.internal_error(error)

    return call


class CloseReason(Enum):
    MAX_CONNECTIONS = "max-connections"
    OUT_OF_FILES = "out-of-files"
    TLS_HANDSHAKE = "tls-handshake"
    HEAD_TIMEOUT = "head-timeout"
    BODY_TIMEOUT = "body-timeout"
    SEND_TIMEOUT = "send-timeout"
    BAD_REQUEST = "bad-request"


CountClosed = Callable[[CloseReason, int], None]
"""Called with the reason and the number of connections."""

CLOSED_AFTER = {
    HeadTimeout: CloseReason.HEAD_TIMEOUT,
    BodyTimeout: CloseReason.BODY_TIMEOUT,
    InvalidHttp: CloseReason.BAD_REQUEST,
    HeadTooLarge: CloseReason.BAD_REQUEST,
}
"""Why the connection closes after an error, by the class of the error; others leave the connection unchanged."""


def count_nothing(why: CloseReason, number: int) -> None:
    """Count nothing."""


_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""The event of a peer that has closed, which Linux reports although earlier bytes are unread."""


def has_hung_up(transport: asyncio.Transport) -> bool:
    """Return whether the peer of a connection that is not read has closed it; False if the system does not tell."""
    connection = transport.get_extra_info("socket")
    if not _HANG_UP or connection is None or connection.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), _HANG_UP)
    return bool(poll.poll(0))


RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset and drops the data in the kernel."""

_BYTES_ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` in the kernel's `struct tcp_info`."""


class SendProgress:
    """Progress of a client that has bytes to read, measured at each sweep. Linux counts the bytes that the client's
    kernel has acknowledged. On other systems the write buffer must shrink, which under TLS is visible only when it
    becomes empty."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._sent = 0
        self._moved_at: float | None = None

    def stalled_for(self, now: float) -> float:
        """Return the seconds since the client last read a byte; 0 if none is waiting for it. `now` is monotonic
        seconds."""
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
    """Close with a reset and drop unsent data: after an orderly close, a response that ends with the connection would
    look complete."""
    sock = transport.get_extra_info("socket")
    is_open = not transport.is_closing() or transport.get_write_buffer_size()  # a closed one may be another's by now
    if sock is not None and is_open:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


def _acknowledged(sock: Any) -> int | None:
    """Return None if the kernel does not count them."""
    if sock is None or sys.platform != "linux":
        return None
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    except OSError:
        return None
    acknowledged: int | None = _BYTES_ACKED.unpack(info)[0] if len(info) == _BYTES_ACKED.size else None
    return acknowledged


LINGER = 5.0
LINGER_BYTES = 64 * 1024 * 1024
"""Limits on how long and how much a client may keep sending on a half-closed connection."""


class HalfClosed:
    """A half-closed connection. Closing while the client sends would reset the connection and lose the response, so
    received bytes are discarded until the client closes too. TLS cannot be half-closed."""

    def __init__(self, socket: asyncio.Transport) -> None:
        self._socket = socket
        self._left = LINGER_BYTES
        self._since: float | None = None
        if socket.can_write_eof():
            try:
                socket.write_eof()
            except OSError:  # the client has left while nothing was read from it
                socket.abort()

    def feed(self, data: memoryview) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._socket.abort()

    def check(self, now: float) -> None:
        """Called by the sweep. `now` is monotonic seconds."""
        if self._since is None:
            self._since = now
        elif now - self._since > LINGER:
            self._socket.abort()
