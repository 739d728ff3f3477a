"""What hosts say to each other through the store, as bytes: a head, and frames of records or a few plain facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from proxy.replicas.wire import Frames, Garbled, Kind, kinds, record, records

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
