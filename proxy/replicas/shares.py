"""Between how many hosts a deployment's caps are divided, and which of them this one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import orjson

from proxy.core.ports import Clock
from proxy.replicas.wire import Kind, record


class Shares:
    """`changed(record)` gets what members are to be told. Hosts are in the order of their ids, so that all who hear of
    the same ones divide alike.

    Without the store the division stays as it was, or with the policy `open` each host has all. When the store is back,
    hosts that there were count for a lease, heard or not: they come back one after the other.
    """

    def __init__(
        self,
        own: bytes,
        policy: Literal["localShare", "open"],
        lease: float,
        clock: Clock,
        changed: Callable[[bytes], None],
    ) -> None:
        self._own = own
        self._policy = policy
        self._lease = lease
        self._clock = clock
        self._changed = changed
        self._hosts: frozenset[bytes] = frozenset((own,))
        self._before: frozenset[bytes] = frozenset()
        self._until = 0.0
        """For how long those before count."""
        self._is_up = False
        self.record = self._made()

    def found(self) -> None:
        """The store is there."""
        self._is_up = True
        self._until = self._clock.now() + self._lease
        self._say()

    def lost(self) -> None:
        """It is away."""
        self._before, self._is_up = self._hosts, False
        if self._policy == "open":
            self._hosts = frozenset((self._own,))
        self._say()

    def look(self, heard: Iterable[bytes]) -> None:
        """These others are heard of."""
        if not self._is_up:
            return
        if self._before and self._clock.now() >= self._until:
            self._before = frozenset()
        self._hosts = self._before.union(heard, (self._own,))
        self._say()

    def left(self, host: bytes) -> None:
        """It said so."""
        self._before -= {host}

    def _say(self) -> None:
        if (made := self._made()) != self.record:
            self.record = made
            self._changed(made)

    def _made(self) -> bytes:
        rank = sorted(self._hosts).index(self._own)
        return record(Kind.HOSTS, orjson.dumps((len(self._hosts), rank, self._is_up)))
