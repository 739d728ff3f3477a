"""Who waits at which worker of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson

from proxy.replicas.wire import Garbled, Kind

Tell = Callable[[Kind, bytes], None]


Lent = Mapping[int, Mapping[str, int]]
"""By worker and by cap: how much one has ever given it of its part."""


class Waiting(Protocol):
    """`flowcontrol.siblings.Siblings` is one. Priorities are the highest that wait at a worker, None: nobody does."""

    @property
    def told(self) -> int | None: ...
    @property
    def given(self) -> Lent: ...
    def take(self, peer: int, highest: int | None, lent: Lent) -> None: ...
    def vanished(self, peer: int) -> None: ...


def said(pool: str, highest: int | None, given: Lent) -> bytes:
    return orjson.dumps((pool, highest, given), option=orjson.OPT_NON_STR_KEYS)


def _lent(given: Mapping[str, Any]) -> Lent:
    """Raises Garbled."""
    try:
        return {int(peer): {cap: int(amount) for cap, amount in caps.items()} for peer, caps in given.items()}
    except (ValueError, TypeError, AttributeError):
        raise Garbled("parts that are none") from None


class SharedQueue:
    """One priority per worker and pool, said when it changes."""

    def __init__(self, pool: str, waiting: Waiting, changed: Callable[[], None]) -> None:
        self.pool = pool
        self._waiting = waiting
        self._changed = changed

    def take(self, peer: int, body: bytes) -> None:
        """What is of another pool is passed over. Raises Garbled."""
        match orjson.loads(body):
            case [str(pool), None | int() as highest, dict(given)]:
                lent = _lent(given)
                if pool == self.pool:
                    self._waiting.take(peer, highest, lent)
                    self._changed()
            case _:
                raise Garbled("a priority that is none")

    def vanished(self, peer: int) -> None:
        self._waiting.vanished(peer)
        self._changed()

    def all(self) -> bytes:
        """What is said to those who join."""
        return said(self.pool, self._waiting.told, self._waiting.given)
