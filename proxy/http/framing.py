"""How the body of a pod's response is framed for its client: bytes in, bytes out, no I/O.

A framing is fed once per read of the pod's connection. `raw` is what was read of the message's body, framing and all;
`bodies` are the pieces of body in it; `marks` are the edges of HTTP chunks that it crossed, in order: OPENED, CLOSED.
It returns what goes to the client; `finish` does so for the last read. While a framing `holds_nothing`, reads that end
with a chunk may go to the client without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.openai.events import EVENT_ENDS

OPENED = 0
CLOSED = 1

HELD_LIMIT = 64 * 1024
"""Bytes of an incomplete chunk that wait for its end."""

LAST_CHUNK = b"0\r\n\r\n"

Pieces = Sequence[bytes]
Marks = Sequence[int]


class Framing:
    """The bare body; the base of the framings."""

    __slots__ = ()

    holds_nothing = False
    """Whether everything fed so far has been sent. Then a read that ends with a chunk may go to the client without
    `feed`. Its pieces and marks stay in the meter, so the next `feed` gets them again."""

    def feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        return b"".join(bodies)

    def finish(self, raw: bytes, bodies: Pieces, exact: bool) -> bytes:
        """`exact`: no bytes of another message follow in `raw`."""
        return b"".join(bodies)

    def end_with(self, event: bytes, tail: bytes) -> bytes | None:
        """Return what ends an interrupted event stream: `event` after a blank line, and the end of the framing; None if
        the connection must be aborted. `tail` is the end of the body so far."""
        return None


class Plain(Framing):
    """The bare body, whose length is in the head."""

    __slots__ = ()

    def feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        return raw

    def finish(self, raw: bytes, bodies: Pieces, exact: bool) -> bytes:
        return raw if exact else b"".join(bodies[-1:])


class UntilClose(Framing):
    """The bare body, which ends with the client's connection."""

    __slots__ = ()

    def end_with(self, event: bytes, tail: bytes) -> bytes | None:
        return _after_blank_line(tail) + event


class Rechunked(Framing):
    """A body that ends with the pod's connection, sent as one chunk per read."""

    __slots__ = ()

    def feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        return chunk(b"".join(bodies))

    def finish(self, raw: bytes, bodies: Pieces, exact: bool) -> bytes:
        return chunk(b"".join(bodies)) + LAST_CHUNK

    def end_with(self, event: bytes, tail: bytes) -> bytes | None:
        return chunk(_after_blank_line(tail) + event) + LAST_CHUNK


class WholeChunks(Framing):
    """The pod's own chunks, unchanged, each sent only when it is complete, so that the stream can stop after any of
    them. Nearly all reads end with a chunk and cost two comparisons. A chunk larger than HELD_LIMIT is sent as chunks
    of its reads from then on."""

    holds_nothing = True
    _held = b""
    _splitting = False

    def feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        if self.holds_nothing and marks and marks[-1] and raw.endswith(b"\r\n"):
            return raw
        out = self._feed(raw, bodies, marks)
        self.holds_nothing = not self._held and not self._splitting
        return out

    def finish(self, raw: bytes, bodies: Pieces, exact: bool) -> bytes:
        """Trailers are dropped."""
        if self._splitting:
            return chunk(b"".join(bodies)) + LAST_CHUNK
        raw, self._held = self._held + raw, b""
        if exact and (raw.endswith(b"\r\n0\r\n\r\n") or raw == LAST_CHUNK):
            return raw
        return raw[: _whole(raw)] + LAST_CHUNK

    def end_with(self, event: bytes, tail: bytes) -> bytes | None:
        unsent = len(_body_of_part(self._held))
        sent = tail[: len(tail) - unsent] if unsent < len(tail) or not unsent else b"?"
        return chunk(_after_blank_line(sent) + event) + LAST_CHUNK

    def _feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        if self._splitting:
            self._splitting = not (marks and marks[-1] and raw.endswith(b"\r\n"))
            return chunk(b"".join(bodies))
        raw = self._held + raw
        end = _whole(raw)
        held = raw[end:]
        if len(held) <= HELD_LIMIT:
            self._held = held
            return raw[:end]
        self._held, self._splitting = b"", True
        return raw[:end] + chunk(_body_of_part(held))


def chunk(body: bytes) -> bytes:
    """Return the body as one chunk; nothing for an empty one, which would end the message."""
    return b"%x\r\n%b\r\n" % (len(body), body) if body else b""


def _whole(raw: bytes) -> int:
    """Return the end of the last complete chunk in `raw`, which starts with a valid chunk; the final chunk of a message
    does not count."""
    at = 0
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            return at
        size = _size(raw, at, line_end)
        after = line_end + size + 4
        if not size or after > len(raw):
            return at
        at = after


def _body_of_part(raw: bytes) -> bytes:
    """Return the body in `raw`, the start of one chunk."""
    line_end = raw.find(b"\r\n")
    if line_end < 0:
        return b""
    return raw[line_end + 2 : line_end + 2 + _size(raw, 0, line_end)]


def _size(raw: bytes, start: int, line_end: int) -> int:
    return int(raw[start:line_end].partition(b";")[0], 16)


def _after_blank_line(sent: bytes) -> bytes:
    """Return the line ends that separate an event from the bytes sent before."""
    return b"" if not sent or sent.endswith(EVENT_ENDS) else b"\n\n"
