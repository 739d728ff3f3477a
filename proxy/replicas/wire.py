"""What replicas say to each other, as bytes: frames between processes, made of records."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from struct import error as StructError

HUB = 0
"""The address of the supervisor."""

EVERYBODY = 0xFFFFFFFF
"""The address of all others, the supervisor included."""

OTHER_HOSTS = 0xFFFFFFFE
"""The address of all processes of other hosts."""

LARGEST_FRAME = 64 * 1024 * 1024

_FRAME = Struct("<II")
"""Length of the records, and the address: where to, on the way to the hub; where from, on the way back."""

_RECORD = Struct("<BI")


class Kind(IntEnum):
    """Of a record. Absolute values wherever possible, so that a lost record is made good by the next."""

    # the hub says
    POD = 1
    METRICS = 2
    ROLL = 3
    SNAPSHOT = 4
    """Tell a peer all you have in flight; and, if so asked, what you remember."""
    VANISHED = 5
    """A peer is gone, and with it all that it had in flight."""
    STOPPING = 6
    """Whoever asks is to be told that no new requests are wanted."""
    SETTINGS = 7
    """Serve with these: their number, and what they are made of."""
    LEVELS = 8
    """How much each room is to say in the log."""
    HOSTS = 9
    """Between how many hosts caps are divided, which of them this one is, and whether it hears of the others."""
    MODELS_READ = 10
    """Up to which number, by worker, the rounds of READ_ROUND are over. What they found has been told before."""

    # a worker says
    RESET = 16
    """What I said of my requests in flight is void; all there is follows."""
    LOAD = 17
    MOVES = 18
    """What I reserved and settled in an index."""
    FORGET = 20
    MEMORY = 21
    BINDINGS = 22
    READY = 23
    LEAVING = 24
    """I take nobody new."""
    FAREWELL = 25
    """My last exposition."""
    SESSIONS = 26
    SPENT = 40
    """Of the limits of a key or a tenant."""
    USED = 41
    """What was spent in all, as I know it."""

    WAITING = 42
    """The highest priority that waits here for room on the pods."""

    RELOADED = 43
    """The number of the settings that I was told, and whether I serve with them."""

    ALIVE = 44
    """My event loop turns. Sent once a second."""

    READ_ROUND = 45
    """Read the models of all pods: a number that comes back when that is done."""

    READ_POD = 46
    """Read the models of this pod."""

    # both say
    DOUBTS = 32
    """All that I have against pods."""
    BREAKER = 33
    """A breaker opened here, or closed again."""
    TRIED = 35
    """A pod whose breaker is open is being tried here."""
    DRAINS = 34
    """Pods that an operator drains, or takes back."""


class Garbled(Exception):
    """Bytes that are no frame, or no record."""


UNREADABLE = (Garbled, StructError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What taking in the bytes of another process can raise. It is counted and logged, and costs that message only: a link
that is cut for it would cost a worker, or all that is known of a host."""


def frame(address: int, records: bytes) -> bytes:
    return _FRAME.pack(len(records), address) + records


def record(kind: Kind, body: bytes) -> bytes:
    return _RECORD.pack(kind, len(body)) + body


def records(data: bytes) -> Iterator[tuple[Kind, bytes]]:
    """Raises Garbled at the first thing that is no record; kinds of a newer version are passed over."""
    at, end = 0, len(data)
    while at < end:
        try:
            kind, size = _RECORD.unpack_from(data, at)
        except StructError:
            raise Garbled("a record's head is cut off") from None
        at += _RECORD.size + size
        if at > end:
            raise Garbled("a record is cut off")
        if kind in _KINDS:
            yield _KINDS[kind], data[at - size : at]


def kinds(data: bytes) -> list[int]:
    """Those of the records, known or not. Raises Garbled."""
    found, at, end = [], 0, len(data)
    head, unpack = _RECORD.size, _RECORD.unpack_from
    try:
        while at < end:
            kind, size = unpack(data, at)
            found.append(kind)
            at += head + size
    except StructError:
        raise Garbled("a record's head is cut off") from None
    if at > end:
        raise Garbled("a record is cut off")
    return found


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """(address, records) of every frame that is complete. Raises Garbled."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _FRAME.size:
            size, address = _FRAME.unpack_from(buffer, at)
            if size > LARGEST_FRAME:
                raise Garbled(f"a frame of {size} bytes")
            end = at + _FRAME.size + size
            if len(buffer) < end:
                break
            yield address, bytes(buffer[at + _FRAME.size : end])
            at = end
        del buffer[:at]

    @property
    def is_waiting(self) -> bool:
        """Whether a frame has begun."""
        return bool(self._buffer)


_KINDS = {int(kind): kind for kind in Kind}
