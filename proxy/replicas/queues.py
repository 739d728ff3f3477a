"""Who waits at which process of a deployment, and who has given whom what of the caps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from proxy.replicas.peers import FIRST_NUMBER
from proxy.replicas.wire import Garbled, Kind

Tell = Callable[[Kind, bytes], None]


Lent = Mapping[str, Mapping[str, int] | None]
"""By name and by cap: how much one has ever given it of its part; None: nothing that counts any more."""


class Waiting(Protocol):
    """`flowcontrol.siblings.Siblings` is one. Priorities are the highest that wait at a process, None: nobody does."""

    @property
    def name(self) -> str: ...
    @property
    def told(self) -> int | None: ...
    @property
    def given(self) -> Lent: ...
    @property
    def wants(self) -> Sequence[str]: ...
    def take(self, peer: int, name: str, highest: int | None, lent: Lent, wants: Sequence[str]) -> None: ...
    def reset(self, peer: int) -> None: ...
    def vanished(self, peer: int) -> None: ...
    def among(self, hosts: int, rank: int) -> None: ...
    def cut_off(self, first: int) -> None: ...


def said(pool: str, name: str, highest: int | None, given: Lent, wants: Sequence[str]) -> bytes:
    return orjson.dumps((pool, name, highest, given, wants))


def _lent(given: Mapping[str, Any]) -> Lent:
    """Raises Garbled."""
    try:
        return {
            name: None if caps is None else {cap: int(amount) for cap, amount in caps.items()}
            for name, caps in given.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise Garbled("parts that are none") from None


class SharedQueue:
    """One priority per process and pool, said when it changes."""

    def __init__(self, pool: str, waiting: Waiting, changed: Callable[[], None]) -> None:
        self.pool = pool
        self._waiting = waiting
        self._changed = changed

    def take(self, peer: int, body: bytes) -> None:
        """What is of another pool is passed over. Raises Garbled."""
        match orjson.loads(body):
            case [str(pool), str(name), None | int() as highest, dict(given), list(wants)]:
                lent = _lent(given)
                if pool == self.pool:
                    self._waiting.take(peer, name, highest, lent, [str(each) for each in wants])
                    self._changed()
            case _:
                raise Garbled("a priority that is none")

    def reset(self, peer: int) -> None:
        """All that it has to say follows."""
        self._waiting.reset(peer)

    def vanished(self, peer: int) -> None:
        self._waiting.vanished(peer)
        self._changed()

    def among(self, hosts: int, rank: int, are_heard: bool) -> None:
        """Between which the caps are divided; of those that are not heard nothing counts that was given or got."""
        self._waiting.among(hosts, rank)
        if not are_heard:
            self._waiting.cut_off(FIRST_NUMBER)
        self._changed()

    def all(self) -> bytes:
        """What is said to those who join."""
        waiting = self._waiting
        return said(self.pool, waiting.name, waiting.told, waiting.given, waiting.wants)
