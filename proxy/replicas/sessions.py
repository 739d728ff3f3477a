"""Which session is bound to which pod, known to all workers of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from struct import Struct
from struct import error as StructError
from typing import Protocol
from zlib import crc32

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.replicas.wire import Garbled, Kind

MOST_TOLD = 20_000
"""Sessions that a joining worker is told of: the ones used last."""

PER_RECORD = 200

_TABLE = Struct("<I")
_BINDING = Struct("<16sfH")
"""The session's key, seconds since it was used, length of the pod's name; the name follows."""

Tell = Callable[[Kind, bytes], None]
Find = Callable[[str], Endpoint | None]


class Table(Protocol):
    """`plugins.session_table.SessionTable` is one; keys have 16 bytes."""

    on_bind: Callable[[bytes, Endpoint], None]

    def take(self, key: bytes, endpoint: Endpoint, used_at: float) -> None: ...
    def recent(self, most: int) -> Iterator[tuple[bytes, Endpoint, float]]: ...


def table_tag(name: str) -> int:
    """What workers call a table that they share: the name of the plugin that has it."""
    return crc32(name.encode())


class SharedSessions:
    """Says what is bound here, and binds here what peers say; of two bindings the one used last counts.

    Two workers that bind one new session within milliseconds may each follow the other; they agree from the next
    request on."""

    def __init__(self, table: Table, clock: Clock, *, tag: int, tell: Tell, find: Find) -> None:
        """`find` gives the living pod of a name."""
        self._table = table
        self._clock = clock
        self._head = _TABLE.pack(tag)
        self._tell = tell
        self._find = find
        table.on_bind = self._bound

    def take(self, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then. What is of another table is passed over."""
        if body.startswith(self._head):
            now = self._clock.now()
            for key, age, pod in list(_bindings(body)):
                if (endpoint := self._find(pod)) is not None:
                    self._table.take(key, endpoint, now - age)

    def memory(self, most: int = MOST_TOLD) -> Iterator[bytes]:
        """Bodies of SESSIONS, the oldest first."""
        now = self._clock.now()
        known = [_binding(key, now - used_at, endpoint) for key, endpoint, used_at in self._table.recent(most)]
        for start in range(0, len(known), PER_RECORD):
            yield self._head + b"".join(known[start : start + PER_RECORD])

    def _bound(self, key: bytes, endpoint: Endpoint) -> None:
        self._tell(Kind.SESSIONS, self._head + _binding(key, 0.0, endpoint))


def _binding(key: bytes, age: float, endpoint: Endpoint) -> bytes:
    name = endpoint.name.encode()
    return _BINDING.pack(key, age, len(name)) + name


def _bindings(body: bytes) -> Iterator[tuple[bytes, float, str]]:
    at = _TABLE.size
    while at < len(body):
        try:
            key, age, size = _BINDING.unpack_from(body, at)
            at += _BINDING.size + size
            if at > len(body):
                raise Garbled("a session's pod is cut off")
            if not 0.0 <= age < inf:
                raise Garbled("a session of no age")
            yield key, age, body[at - size : at].decode()
        except (StructError, UnicodeDecodeError):
            raise Garbled("a session that is none") from None
