"""The encoding of messages: frames between processes and packets between hosts, both made of records."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from struct import error as StructError
from typing import Any

import orjson

HUB = 0
"""The address of the supervisor."""

EVERYBODY = 0xFFFFFFFF
"""The address of all others, the supervisor included."""

OTHER_HOSTS = 0xFFFFFFFE
"""The address of all processes of other hosts."""

FIRST_NUMBER = 1 << 24
"""Of members of other hosts; those of this one have smaller numbers."""

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


MOST = 0xFFFFFFFF

FEW = 64
"""Numbers that are packed by one call for their number, which takes less than to make an array of them first."""


def words(numbers: Sequence[int]) -> bytes:
    """Four bytes each; what is more than fits is the most that does, and less than nothing is nothing."""
    try:
        return array("I", numbers).tobytes()
    except OverflowError:
        return array("I", clamped(numbers)).tobytes()


def clamped(numbers: Iterable[int]) -> list[int]:
    """As they fit into four bytes."""
    return [min(max(number, 0), MOST) for number in numbers]


def longs(numbers: Sequence[int]) -> bytes:
    """Eight bytes each."""
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


VERSION = 2
ID_BYTES = 8

_HEAD = Struct(f"<BB{ID_BYTES}sQ")


class Say(IntEnum):
    """To everybody, but for ASK and ANSWER. What everybody is told is numbered, so that who misses something knows."""

    NEWS = 1
    """Frames: of each member of the host its records."""
    BEAT = 2
    """I live: who my members are, and which configuration is in effect."""
    HELLO = 3
    """As BEAT; I join, or have missed something: tell me what is in flight."""
    BYE = 4
    ASK = 5
    """Tell me what is in flight; and, if so asked, what you remember."""
    ANSWER = 6
    """As NEWS. Its number is that of the last thing that was said to everybody."""


@dataclass(frozen=True, slots=True)
class Packet:
    """`host` tells a process from all others that ever were."""

    say: Say
    host: bytes
    number: int
    body: bytes

    def packed(self) -> bytes:
        return packed(self.say, self.host, self.number, self.body)

    @staticmethod
    def read(data: bytes) -> Packet | None:
        """None if it is of another version, or says what this one does not know. Raises Garbled."""
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
    """Whose packet it is."""
    return data[2 : 2 + ID_BYTES]


def members(body: bytes) -> Iterator[tuple[int, bytes]]:
    """(member, its records) of NEWS and ANSWER. Raises Garbled."""
    frames = Frames()
    yield from frames.feed(body)
    if frames.is_waiting:
        raise Garbled("a member's records are cut off")


def shared(batch: bytes) -> bytes:
    """The records of it that other hosts are told, and that are believed if another host says them: never what a
    supervisor tells its workers. Raises Garbled."""
    if SHARED.issuperset(kinds(batch)):
        return batch
    return b"".join(record(kind, body) for kind, body in records(batch) if kind in SHARED)


SHARED = frozenset(
    {
        Kind.RESET,
        Kind.LOAD,
        Kind.MOVES,
        Kind.FORGET,
        Kind.MEMORY,
        Kind.BINDINGS,
        Kind.SESSIONS,
        Kind.SPENT,
        Kind.USED,
        Kind.BREAKER,
        Kind.TRIED,
        Kind.DRAINS,
        Kind.WAITING,
    }
)
"""Doubts are not: that a pod cannot be reached from one host says little of the others."""

_SAYS = {int(say): say for say in Say}


_MOST = 0xFFFFFFFF
"""The largest address of a frame."""


def breaker(body: bytes) -> tuple[str, bool]:
    """Return a pod's name, and whether its breaker is open."""
    match _json(body):
        case [str(name), bool(is_open)]:
            return name, is_open
    raise Garbled("a breaker needs a pod and a state")


def pod(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Garbled("the name of a pod is not UTF-8") from None


def bindings(body: bytes) -> Sequence[tuple[str, str]]:
    """Return pairs of a response id and the name of its pod."""
    found = []
    for entry in _list(body):
        match entry:
            case [str(response_id), str(name)]:
                found.append((response_id, name))
            case _:
                raise Garbled("a binding needs a response id and a pod")
    return found


def doubts(body: bytes) -> dict[str, list[str]]:
    """Return reasons by the name of the pod."""
    match _json(body):
        case dict(found) if all(isinstance(whys, list) and _are_texts(whys) for whys in found.values()):
            return found
    raise Garbled("doubts need a list of reasons for each pod")


def reloaded(body: bytes) -> tuple[int, bool]:
    """Return the number of settings, and whether the worker serves with them."""
    match _json(body):
        case [int(number), bool(is_good)]:
            return number, is_good
    raise Garbled("a reload needs a number and a result")


def number(body: bytes) -> int:
    match _json(body):
        case int(found):
            return found
    raise Garbled("a round of reads needs a number")


def numbers(body: bytes) -> dict[int, int]:
    """Return numbers by worker."""
    found = {}
    for entry in _list(body):
        match entry:
            case [int(worker), int(number)]:
                found[worker] = number
            case _:
                raise Garbled("the end of a round needs a worker and a number")
    return found


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
            return name, config, members
    raise Garbled("a host needs a name, a configuration and its members")


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        raise Garbled("a body is not JSON") from None


def _list(body: bytes) -> list[Any]:
    found = _json(body)
    if not isinstance(found, list):
        raise Garbled("a body is not a list")
    return found


def _are_texts(items: Sequence[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def _is_address(item: Any) -> bool:
    return type(item) is int and 0 <= item <= _MOST
