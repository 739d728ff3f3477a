"""The framing of a stream whose usage was asked for by the proxy: its client gets none of that."""

from __future__ import annotations

from proxy.http.framing import LAST_CHUNK, Bodies, Framing, Marks, chunk, unchunked
from proxy.openai.asked_usage import IN_QUESTION, UsageTaker

ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
"""Of a read whose last chunk ends with an event."""


class WithoutUsage:
    """Around the framing that the answer would have else. Whole events go out, each in a chunk of its own, which is how
    engines send them; reads that have nothing in question go as they came."""

    __slots__ = ("_chunked", "_framing", "_taker")

    def __init__(self, framing: Framing, chunked: bool) -> None:
        """`chunked` says whether that one writes chunks, or the bare body."""
        self._framing = framing
        self._chunked = chunked
        self._taker = UsageTaker()

    @property
    def in_step(self) -> bool:
        return self._framing.in_step and not self._taker.holds

    @property
    def looks_at_events(self) -> bool:
        return not self._taker.passes_all or self._framing.looks_at_events

    def feed(self, raw: bytes, bodies: Bodies, marks: Marks) -> bytes:
        out = self._framing.feed(raw, bodies, marks)
        return out if self._passes(out) else self._framed(self._taker.take(self._body(out)))

    def finish(self, raw: bytes, bodies: Bodies, exact: bool) -> bytes:
        out = self._framing.finish(raw, bodies, exact)
        if self._passes(out):
            return out
        events = self._taker.take(self._body(out)) + self._taker.rest()
        return self._framed(events) + (LAST_CHUNK if self._chunked else b"")

    def cut(self, event: bytes, tail: bytes) -> bytes | None:
        """What went out ended with an event."""
        if self._taker.passes_all:
            return self._framing.cut(event, tail)
        return self._framed([self._taker.last(), event]) + (LAST_CHUNK if self._chunked else b"")

    def _passes(self, out: bytes) -> bool:
        taker = self._taker
        if taker.passes_all:
            return True
        return self._chunked and not taker.holds and out.endswith(ENDS) and not IN_QUESTION(out)

    def _body(self, out: bytes) -> bytes:
        return unchunked(out) if self._chunked else out

    def _framed(self, events: list[bytes]) -> bytes:
        return b"".join(map(chunk, events) if self._chunked else events)
