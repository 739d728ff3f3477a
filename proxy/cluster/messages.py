"""The encoding of messages between processes, of one host and of several: packets, which are made of records."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from struct import error as StructError

import orjson

HOST_BYTES, NUMBER_BYTES = 5, 3
ID_BYTES = HOST_BYTES + NUMBER_BYTES
"""The id of a process: its host, which is random, and its number on this host."""

BROKER = 0
"""The number of a supervisor. Processes that serve have other numbers."""

FIRST_NUMBER = 1 << 8 * NUMBER_BYTES
"""The first number that a process gives processes of other hosts. Processes of a host have smaller numbers."""

ALL_PEERS = FIRST_NUMBER - 1
"""The number that addresses all processes of a host."""

ABSENT = FIRST_NUMBER - 2
"""The process number of the assumed sender that stands for all unreachable hosts."""

LONGEST_NAME = 1024
"""Largest length, in characters, of a name of another host, of a key, of a pod or of a cap."""

VERSION = 6
"""The version of packets between hosts."""

LARGEST_PACKET = 64 * 1024 * 1024

_HEAD = Struct(f"<IB{ID_BYTES}sQ")
"""Length of the body, what the packet is, its sender and its number."""

_RECORD = Struct("<BI")
HEAD_BYTES = _RECORD.size
"""Bytes of a record before its body."""


class RecordKind(IntEnum):
    """The kind of a record. Values are absolute where possible, so that the next record corrects a lost one."""

    # from the supervisor to workers
    POD = 1
    METRICS = 2
    ROLL = 3
    STOPPING = 6
    """Notify clients and load balancers that the host accepts no new requests."""
    LEVELS = 8
    """Log levels by logger."""
    HOSTS = 9
    """The number of hosts that divide the caps, the position of this one, and whether the others can be reached."""

    # from a worker to the supervisor
    READY = 23
    LEAVING = 24
    """The worker takes no new connections."""
    FAREWELL = 25
    """The worker's last metrics."""

    # within a host
    QUESTION = 43
    REPLY = 44
    EJECTIONS = 32
    """All reasons for which the sender does not send requests to pods."""

    # shared by all processes of all hosts
    RESET = 16
    """All current state of the sender is void; the new one follows."""
    LOAD = 17
    MOVES = 18
    """Reservations that the sender made and settled in a prefix index."""
    HAS_LASTING = 19
    """The sender has lasting state, such as prefixes."""
    FORGET = 20
    MEMORY = 21
    SESSIONS = 26
    BREAKER = 33
    """A breaker opened or closed, or the recovery of its pod is being tested."""
    DRAINS = 34
    """Pods that an operator or the autoscaler drains or returns to service."""
    SCRAPE = 27
    """A scrape of a pod, for hosts that then do not scrape the pod themselves."""
    SPEEDS = 35
    """What the sender has learned of the speeds of pods."""
    SPENT = 40
    """A charge on the limits of a key or tenant."""
    USED = 41
    """The total spending of a key or tenant, as the sender knows it."""
    WAITING = 42
    """The highest waiting priority at the sender, the time since which it waits, and the caps that the sender lends."""


SHARED = frozenset(
    (
        RecordKind.RESET,
        RecordKind.LOAD,
        RecordKind.MOVES,
        RecordKind.HAS_LASTING,
        RecordKind.FORGET,
        RecordKind.MEMORY,
        RecordKind.SESSIONS,
        RecordKind.BREAKER,
        RecordKind.DRAINS,
        RecordKind.SCRAPE,
        RecordKind.SPEEDS,
        RecordKind.SPENT,
        RecordKind.USED,
        RecordKind.WAITING,
    )
)
"""Kinds that are applied if a process of another host sends them. EJECTIONS are not among them: another host may reach
a pod that this one cannot reach."""


class InvalidMessage(Exception):
    """Bytes that cannot be read as a message."""


UNREADABLE = (InvalidMessage, StructError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors that applying the bytes of another process can raise. An error is counted and logged, and discards only that
message: closing the link would cost a worker, or the whole state of a host."""


def summary(error: Exception) -> str:
    """Return a shortened error for the log, because the sender may have chosen its text."""
    return f"{type(error).__name__}: {error!s:.200}"


class PacketKind(IntEnum):
    """What a packet is. NEWS, BEAT and HELLO go to all processes and are numbered, so that a receiver notices a gap.
    ASK, STATE and DIRECT have one receiver: a process, or all of a host."""

    NEWS = 1
    """Records."""
    BEAT = 2
    """A heartbeat. The body is empty, or has the name and the configuration of the host."""
    HELLO = 3
    """As BEAT; the sender joins, or may have missed packets: send it the current state."""
    BYE = 4
    """The sender has ended: drop its current state."""
    ASK = 5
    """Send the current state, and a part of the lasting state, to an address."""
    STATE = 6
    """Records of current state, or of lasting state, with the number of the sender's last numbered packet."""
    DIRECT = 7
    """Records within the host."""


_PACKET_KINDS = {int(kind): kind for kind in PacketKind}
_WITH_RECEIVER = frozenset((PacketKind.ASK, PacketKind.STATE, PacketKind.DIRECT))


@dataclass(slots=True)
class Packet:
    """`to` is the receiver; None for all. `packed` are the bytes of the packet."""

    kind: PacketKind
    sender: bytes
    number: int
    body: bytes
    to: bytes | None
    packed: bytes


def packet(kind: PacketKind, sender: bytes, number: int, body: bytes, to: bytes | None = None) -> Packet:
    receiver = to or b""
    packed = _HEAD.pack(len(receiver) + len(body), kind, sender, number) + receiver + body
    return Packet(kind, sender, number, body, to, packed)


class Packets:
    """Splits a stream of bytes into packets."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Packet]:
        """Yield each packet that is complete. Raises InvalidMessage."""
        buffer, size = self._buffer, _HEAD.size
        buffer += data
        at = 0
        while len(buffer) - at >= size:
            length, kind, sender, number = _HEAD.unpack_from(buffer, at)
            if length > LARGEST_PACKET or kind not in _PACKET_KINDS:
                raise InvalidMessage(f"a packet of kind {kind} with {length} bytes")
            if len(buffer) - at < size + length:
                break
            packed = bytes(buffer[at : at + size + length])
            at += size + length
            to, start = None, size
            if _PACKET_KINDS[kind] in _WITH_RECEIVER:
                start += ID_BYTES
                to = packed[size:start]
                if len(to) < ID_BYTES:
                    raise InvalidMessage("a packet without its receiver")
            yield Packet(_PACKET_KINDS[kind], sender, number, packed[start:], to, packed)
        del buffer[:at]

    @property
    def is_waiting(self) -> bool:
        """Whether a part of a packet was received."""
        return bool(self._buffer)


def message(packed: bytes) -> bytes:
    """Return packets as one message between hosts."""
    return _VERSION + packed


_VERSION = bytes((VERSION,))


def packets(data: bytes) -> Iterator[Packet]:
    """Yield the packets of a message of this version. Raises InvalidMessage."""
    split = Packets()
    yield from split.feed(data[1:])
    if split.is_waiting:
        raise InvalidMessage("a packet is cut off")


def record(kind: RecordKind, body: bytes) -> bytes:
    return _RECORD.pack(kind, len(body)) + body


def records(data: bytes) -> Iterator[tuple[RecordKind, bytes]]:
    """Yield kind and body of each record, except of kinds of a newer version. Raise one of UNREADABLE."""
    at, end = 0, len(data)
    while at < end:
        kind, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size + size
        if at > end:
            raise InvalidMessage("a record is cut off")
        if kind in _RECORD_KINDS:
            yield _RECORD_KINDS[kind], data[at - size : at]


_RECORD_KINDS = {int(kind): kind for kind in RecordKind}


MOST = 0xFFFFFFFF

FEW = 64
"""Up to this many numbers are packed with a precompiled format, which costs less than an array."""


def words(numbers: Sequence[int]) -> bytes:
    """Return numbers as four bytes each, limited to 0 to MOST."""
    try:
        return array("I", numbers).tobytes()
    except OverflowError:
        return array("I", clamped(numbers)).tobytes()


def clamped(numbers: Iterable[int]) -> list[int]:
    """Return the numbers limited to the range of four bytes."""
    return [min(max(number, 0), MOST) for number in numbers]


def longs(numbers: Sequence[int]) -> bytes:
    """Return numbers as eight bytes each."""
    count = len(numbers)
    return _FEW[count](*numbers) if count < FEW else array("Q", numbers).tobytes()


def read_words(data: bytes, at: int, count: int) -> list[int]:
    """Return numbers of four bytes each. Raise InvalidMessage."""
    return _read("I", data, at, 4 * count)


def read_longs(data: bytes, at: int, count: int) -> list[int]:
    """Return numbers of eight bytes each. Raise InvalidMessage."""
    return _read("Q", data, at, 8 * count)


def _read(form: str, data: bytes, at: int, size: int) -> list[int]:
    part = data[at : at + size]
    if len(part) != size:
        raise InvalidMessage("a column is cut off")
    return array(form, part).tolist()


_FEW = [Struct(f"={count}Q").pack for count in range(FEW)]


_ASK = Struct(f"<{ID_BYTES}sf")


def question(to: bytes, lasting: float) -> bytes:
    """Return the body of an ASK."""
    return _ASK.pack(to, lasting)


def read_question(body: bytes) -> tuple[bytes, float]:
    """Return the address to send to, and the part of the lasting state, from 0 to 1. Raise InvalidMessage."""
    if len(body) != _ASK.size or not 0.0 <= (found := _ASK.unpack(body))[1] <= 1.0:
        raise InvalidMessage("a question needs an address and a share")
    return found[0], found[1]


def hosts(body: bytes) -> tuple[int, int, bool]:
    """Return the number of hosts, the position of this one, and whether the others can be reached. Raise
    one of UNREADABLE."""
    match orjson.loads(body):
        case [int(number), int(position), bool(are_reached)] if 0 <= position < number:
            return number, position, are_reached
    raise InvalidMessage("hosts need a number and a position below it")


def facts(body: bytes) -> tuple[str, str]:
    """Return a host's name and the digest of its configuration. Raise one of UNREADABLE."""
    match orjson.loads(body):
        case {"name": str(name), "config": str(config)} if max(len(name), len(config)) <= LONGEST_NAME:
            return name, config
    raise InvalidMessage("a host needs a name and a configuration")
