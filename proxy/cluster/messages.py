"""The encoding of messages: frames between processes and packets between hosts, both made of records."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from struct import error as StructError
from typing import Any

import orjson

BROKER = 0
"""The address of the supervisor."""

EVERYBODY = 0xFFFFFFFF
"""The address of all others, the supervisor included."""

OTHER_HOSTS = 0xFFFFFFFE
"""The address of all processes of other hosts."""

FIRST_NUMBER = 1 << 24
"""The first number of a member of another host. Members of this host have smaller numbers."""

LARGEST_FRAME = 64 * 1024 * 1024

LONGEST_NAME = 1024
"""Characters of a name of another host, of a key, of a pod or of a cap that is remembered."""

MOST_MEMBERS = 1024
"""Members of another host."""

_FRAME = Struct("<II")
"""Length of the records, and an address: the receiver on the way to the broker, the sender on the way back."""

_RECORD = Struct("<BI")
HEAD_BYTES = _RECORD.size
"""Bytes of a record before its body."""


class Kind(IntEnum):
    """What a record is about. Values are absolute wherever possible, so that the next record makes a lost one good."""

    # from the supervisor to workers
    POD = 1
    METRICS = 2
    ROLL = 3
    SNAPSHOT = 4
    """Send a peer what you have in flight, and this part of what you remember."""
    VANISHED = 5
    """A peer is gone, and with it all that it had in flight."""
    STOPPING = 6
    """Tell clients and load balancers that no new requests are wanted."""
    LEVELS = 8
    """Log levels by logger."""
    HOSTS = 9
    """Among how many hosts caps are divided, which of them this one is, and whether the others are heard."""

    # from a worker to the supervisor
    READY = 23
    LEAVING = 24
    """The worker takes no new connections."""
    FAREWELL = 25
    """The worker's last metrics."""
    ALIVE = 47
    """The worker's event loop runs. Sent once a second."""

    # within a host
    QUESTION = 43
    REPLY = 44
    EJECTIONS = 32
    """Why the sender does not send requests to pods: all reasons."""

    # shared by all processes of all hosts
    RESET = 16
    """What the sender published of its requests in flight is void. All of it follows."""
    LOAD = 17
    MOVES = 18
    """What the sender reserved and settled in a prefix index."""
    FORGET = 20
    MEMORY = 21
    BINDINGS = 22
    SESSIONS = 26
    BREAKER = 33
    """A breaker opened or closed, or the recovery of its pod is being tested."""
    DRAINS = 34
    """Pods that an operator drains or takes back."""
    SPENT = 40
    """A charge on the limits of a key or tenant."""
    USED = 41
    """What a key or tenant has spent in all, as the sender knows it."""
    WAITING = 42
    """The highest priority that waits at the sender, and what it lends of its caps."""


SHARED = frozenset(kind for kind in Kind if kind.value in (*range(16, 23), 26, 33, 34, 40, 41, 42))
"""Kinds that hosts send each other, and apply if another host sends them. EJECTIONS are not among them: that one host
cannot reach a pod says little about the others."""


class Garbled(Exception):
    """Bytes that cannot be read as a message."""


UNREADABLE = (Garbled, StructError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What applying the bytes of another process can raise. It is counted and logged, and costs that message only: closing
the link would cost a worker, or all that is known of a host."""


def summary(error: Exception) -> str:
    """Return an error for the log: its text may have been chosen by the sender, and be long."""
    return f"{type(error).__name__}: {error!s:.200}"


def frame(address: int, records: bytes) -> bytes:
    return _FRAME.pack(len(records), address) + records


def record(kind: Kind, body: bytes) -> bytes:
    return _RECORD.pack(kind, len(body)) + body


def records(data: bytes) -> Iterator[tuple[Kind, bytes]]:
    """Yield kind and body of each record, except of kinds of a newer version. Raises Garbled."""
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
    """Return the kinds of all records, known or not. Raises Garbled."""
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


def receive_frame(sock: socket.socket) -> bytes:
    """Return the records of the next frame of a blocking socket, without reading further. Raises Garbled if it ends."""
    head = sock.recv(_FRAME.size, socket.MSG_WAITALL)
    if len(head) < _FRAME.size:
        raise Garbled("the connection ended before its first frame")
    size, _ = _FRAME.unpack(head)
    found = bytearray()
    while len(found) < size:
        part = sock.recv(size - len(found))
        if not part:
            raise Garbled("the connection ended within its first frame")
        found += part
    return bytes(found)


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield address and records of each frame that is complete. Raises Garbled."""
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


MOST = 0xFFFFFFFF

FEW = 64
"""Up to so many numbers are packed with a precompiled format, which costs less than an array."""


def words(numbers: Sequence[int]) -> bytes:
    """Return numbers as four bytes each, those beyond 0 and MOST as 0 and MOST."""
    try:
        return array("I", numbers).tobytes()
    except OverflowError:
        return array("I", clamped(numbers)).tobytes()


def clamped(numbers: Iterable[int]) -> list[int]:
    """Return the numbers as they fit into four bytes."""
    return [min(max(number, 0), MOST) for number in numbers]


def longs(numbers: Sequence[int]) -> bytes:
    """Return numbers as eight bytes each."""
    count = len(numbers)
    return _FEW[count](*numbers) if count < FEW else array("Q", numbers).tobytes()


def read_words(data: bytes, at: int, count: int) -> list[int]:
    """Raises Garbled."""
    return _read("I", data, at, 4 * count)


def read_longs(data: bytes, at: int, count: int) -> list[int]:
    """Raises Garbled."""
    return _read("Q", data, at, 8 * count)


def _read(form: str, data: bytes, at: int, size: int) -> list[int]:
    part = data[at : at + size]
    if len(part) != size:
        raise Garbled("a column is cut off")
    return array(form, part).tolist()


_FEW = [Struct(f"={count}Q").pack for count in range(FEW)]


VERSION = 3
ID_BYTES = 8

_HEAD = Struct(f"<BB{ID_BYTES}sQ")


class Say(IntEnum):
    """What a packet is. ASK and ANSWER go to one host, all others to all. Packets to all are numbered, so that hosts
    notice when they miss one."""

    NEWS = 1
    """Frames: for each member of the host its records."""
    BEAT = 2
    """The host lives: its members, and the digest of its configuration."""
    HELLO = 3
    """As BEAT; the host joins, or has missed something, and asks for what is in flight."""
    BYE = 4
    ASK = 5
    """Send what is in flight; if the body is true, also what is remembered."""
    ANSWER = 6
    """As NEWS. Its number is that of the last packet to all."""


@dataclass(frozen=True, slots=True)
class Packet:
    """`host` is a number that no other process ever has."""

    say: Say
    host: bytes
    number: int
    body: bytes

    def packed(self) -> bytes:
        return packed(self.say, self.host, self.number, self.body)

    @staticmethod
    def read(data: bytes) -> Packet | None:
        """Return None for a packet of another version, or of an unknown kind. Raises Garbled."""
        if len(data) < _HEAD.size:
            raise Garbled("a packet's head is cut off")
        version, say, host, number = _HEAD.unpack_from(data)
        if version != VERSION or say not in _SAYS:
            return None
        return Packet(_SAYS[say], host, number, data[_HEAD.size :])


def packed(say: Say, host: bytes, number: int, body: bytes) -> bytes:
    return _HEAD.pack(VERSION, say, host, number) + body


def version_of(data: bytes) -> int:
    return data[0]


def host_of(data: bytes) -> bytes:
    """Return the host of a packet."""
    return data[2 : 2 + ID_BYTES]


def members(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each member and its records, of NEWS and ANSWER. Raises Garbled."""
    frames = Frames()
    yield from frames.feed(body)
    if frames.is_waiting:
        raise Garbled("a member's records are cut off")


def shared(batch: bytes) -> bytes:
    """Return the records of kinds that hosts share. Raises Garbled."""
    if SHARED.issuperset(kinds(batch)):
        return batch
    return b"".join(record(kind, body) for kind, body in records(batch) if kind in SHARED)


_SAYS = {int(say): say for say in Say}


_MOST = 0xFFFFFFFF
"""The largest address of a frame."""


def hosts(body: bytes) -> tuple[int, int, bool]:
    """Return the number of hosts, the rank of this one, and whether the others can be reached."""
    match _json(body):
        case [int(number), int(rank), bool(are_heard)] if 0 <= rank < number:
            return number, rank, are_heard
    raise Garbled("hosts need a number and a rank below it")


def snapshot(body: bytes) -> tuple[int, float]:
    """Return the address that asks, and which part of what is remembered it wants."""
    match _json(body):
        case {"to": int(to), "memory": int() | float() as memory} if 0 <= to <= _MOST and 0.0 <= memory <= 1.0:
            return to, float(memory)
    raise Garbled("a snapshot needs an address and a share")


def facts(body: bytes) -> tuple[str, str, Sequence[int]]:
    """Return a host's name, its configuration and its members."""
    match _json(body):
        case {"name": str(name), "config": str(config), "members": list(members)} if all(map(_is_address, members)):
            if len(name) <= LONGEST_NAME and len(config) <= LONGEST_NAME and len(members) <= MOST_MEMBERS:
                return name, config, members
    raise Garbled("a host needs a name, a configuration and its members")


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        raise Garbled("a body is not JSON") from None


def _is_address(item: Any) -> bool:
    return type(item) is int and 0 <= item <= _MOST
