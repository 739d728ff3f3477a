"""What an exchange learns from the bytes of its answer as they pass, at a constant price per read."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.exchange import Exchange
from proxy.core.ports import Clock
from proxy.http.framing import Bodies, Marks
from proxy.openai.observe import response_id_from, usage_from

TAIL = 8 * 1024
"""Bytes of the end that are kept at least, if there were as many; twice as many at most. Usage is in there."""

BEGINNING = 8 * 1024
"""Bytes in which the id of a stored response is looked for."""


class Meter:
    """Fills in an Exchange. Keeps references to the last pieces; they are joined once in TAIL bytes, and at the end."""

    __slots__ = ("_beginning", "_clock", "_exchange", "_on_first_byte", "_size", "_tail", "chunked")

    def __init__(self, exchange: Exchange, clock: Clock, on_first_byte: Callable[[Exchange], None]) -> None:
        self._exchange = exchange
        self._clock = clock
        self._on_first_byte = on_first_byte
        self._tail: list[bytes] = []
        self._size = 0
        self._beginning: bytes | None = b"" if exchange.request.path.startswith("/v1/responses") else None
        self.chunked = False
        """Whether HTTP chunks are counted; else reads are."""

    def add(self, bodies: Bodies, marks: Marks) -> None:
        """One read; the pieces of body in it and the edges of chunks."""
        exchange = self._exchange
        exchange.chunks += sum(marks) if self.chunked else len(bodies)
        size = len(bodies[0]) if len(bodies) == 1 else sum(map(len, bodies))
        if not size:
            return
        exchange.response_bytes += size
        self._tail += bodies
        self._size += size
        if self._size > 2 * TAIL:
            self._trim()
        if exchange.first_byte_at is None:
            self.first_byte()
        if self._beginning is not None:
            self._look_for_id(bodies)

    def first_byte(self) -> None:
        self._exchange.first_byte_at = self._clock.now()
        self._on_first_byte(self._exchange)

    def finish(self, complete: bool) -> None:
        """The answer is over. A whole one without a body has its first byte now."""
        exchange = self._exchange
        if complete:
            if exchange.first_byte_at is None:
                self.first_byte()
            exchange.usage = usage_from(self.tail())
        exchange.last_byte_at = self._clock.now()

    def tail(self) -> bytes:
        """The end of the body so far."""
        return b"".join(self._tail)

    def _trim(self) -> None:
        last = self._tail[-1]
        kept = last[-TAIL:] if len(last) >= TAIL else self.tail()[-TAIL:]
        self._tail = [kept]
        self._size = len(kept)

    def _look_for_id(self, bodies: Bodies) -> None:
        beginning = (self._beginning or b"") + b"".join(bodies)
        self._exchange.response_id = response_id_from(beginning)
        found = self._exchange.response_id is not None or len(beginning) > BEGINNING
        self._beginning = None if found else beginning
