"""Guards of connections and requests that stall, fail or never end."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from proxy.core.errors import BodyTimeout, HeadTimeout, HeadTooLarge, NoHttp, RequestError
from proxy.core.ports import Clock

log = logging.getLogger(__name__)


class Watched(Protocol):
    def check(self, now: float) -> None:
        """Ends what has stalled. `now` is monotonic seconds."""


class Sweep:
    """`watched` is added to and discarded from by whoever waits."""

    def __init__(self, clock: Clock, shortest: float) -> None:
        """`shortest` is the shortest timeout that is watched, in seconds: it is overrun by a quarter at most, or by a
        second."""
        self.watched: set[Watched] = set()
        self._clock = clock
        self.shortest = shortest

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(1.0, max(0.02, self.shortest / 4))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.interval)
            self.look()

    def look(self) -> None:
        look_at(self.watched, self._clock.now())


W = TypeVar("W", bound=Watched)


def _log(watched: Watched, error: Exception) -> None:
    log.error("%r could not be checked", watched, exc_info=error)


def look_at(watched: Iterable[W], now: float, broke: Callable[[W, Exception], None] = _log) -> None:
    """Check each of them. `broke` is given one whose check failed, with the error; the others are checked all the
    same."""
    for each in tuple(watched):
        try:
            each.check(now)
        except Exception as error:  # noqa: BLE001  # logged by `broke`
            broke(each, error)


class Breakable(Protocol):
    def broke(self, error: Exception) -> None:
        """End what is served, and log the error once with the id of the request."""


P = ParamSpec("P")
B = TypeVar("B", bound=Breakable)


def guarded(callback: Callable[Concatenate[B, P], None]) -> Callable[Concatenate[B, P], None]:
    """Give an error of the callback to `broke`. A callback that is called for each read of a stream does so itself: the
    call of a wrapper costs more than its `try`."""

    @wraps(callback)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # `broke` logs it, or gives it to the task that does
            self.broke(error)

    return call


class HungUp(Enum):
    MAX_CONNECTIONS = "max-connections"
    OUT_OF_FILES = "out-of-files"
    TLS_HANDSHAKE = "tls-handshake"
    HEAD_TIMEOUT = "head-timeout"
    BODY_TIMEOUT = "body-timeout"
    SEND_TIMEOUT = "send-timeout"
    BAD_REQUEST = "bad-request"


Tell = Callable[[HungUp, int], None]
"""Why, and on how many."""

_AFTER = {
    HeadTimeout: HungUp.HEAD_TIMEOUT,
    BodyTimeout: HungUp.BODY_TIMEOUT,
    NoHttp: HungUp.BAD_REQUEST,
    HeadTooLarge: HungUp.BAD_REQUEST,
}


def after(refusal: RequestError) -> HungUp | None:
    """None for what leaves its connection as it is."""
    return _AFTER.get(type(refusal))


def untold(why: HungUp, number: int) -> None:
    """For those that nobody counts."""


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

    def feed(self, data: memoryview) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._socket.abort()

    def check(self, now: float) -> None:
        """For the sweep. `now` is monotonic seconds."""
        if self._since is None:
            self._since = now
        elif now - self._since > LINGER:
            self._socket.abort()
