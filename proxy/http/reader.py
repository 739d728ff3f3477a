"""Who finds the requests in the bytes of a connection."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """Calls `begin` of its connection for each request, and `refuse` for what is none."""

    @property
    def keeps(self) -> bool:
        """Whether it may have what came behind a request, and gives it on when it is fed again."""

    def feed(self, data: bytes) -> None:
        """Takes bytes between requests, the first of the next one among them."""

    def leftover(self) -> bytes:
        """What it has kept from behind a request to upgrade."""

    def check(self, now: float) -> bool:
        """Asked by the sweep between requests: whether one has begun to come. Refuses it if it has stalled."""


class NoReader:
    """Where no request follows."""

    __slots__ = ()
    keeps = False

    def feed(self, data: bytes) -> None:
        pass

    def leftover(self) -> bytes:
        return b""

    def check(self, now: float) -> bool:
        return False
