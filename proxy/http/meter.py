"""What an exchange learns from the body of its answer. What came is added up now and then, not read by read."""

from __future__ import annotations

from proxy.core.exchange import Exchange
from proxy.http.framing import OPENED
from proxy.openai.observe import USAGE_LAST, USAGE_WITHIN, response_id_from, usage_from

TAIL = 8 * 1024
"""Bytes of the end that are kept, if there were as many. Usage is in there."""

BEGINNING = 8 * 1024
"""Bytes in which the id of a stored response is looked for."""


class Meter:
    """Belongs to a pod's connection, for one answer after the other.

    `pieces` and `marks` are what the parser has told of the body since `settle`, by `list.append`: parts of it, and the
    edges of HTTP chunks. Once a chunked body was settled, `marks` begins with an OPENED, so that there is a last one.
    """

    __slots__ = ("marks", "pieces", "tail")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.marks: list[int] = []
        self.tail = b""
        """The end of the body, as far as it is settled."""

    def settle(self, exchange: Exchange) -> None:
        """Adds what came to the exchange. Chunks are HTTP chunks, or reads of a body without."""
        pieces, marks = self.pieces, self.marks
        body = b"".join(pieces)
        if exchange.request.path.startswith("/v1/responses"):
            _look_for_id(exchange, self.tail + body)
        exchange.response_bytes += len(body)
        if marks:
            exchange.chunks += sum(marks)  # each CLOSED is 1, and an OPENED 0: half of what it takes to count them
            marks[:] = (OPENED,)
        else:
            exchange.chunks += len(pieces)
        self.tail = body[-TAIL:] if len(body) > TAIL else (self.tail + body)[-TAIL:]
        pieces.clear()

    def finish(self, exchange: Exchange) -> None:
        """The answer is whole: the meter is ready for the next one."""
        if self.marks:
            exchange.chunks -= 1  # the last one only says that there are no more
        self.settle(exchange)
        request = exchange.request
        ends_soon = request.stream and request.path in USAGE_LAST
        exchange.usage = usage_from(self.tail[-USAGE_WITHIN:] if ends_soon else self.tail, request.path)
        self.marks.clear()
        self.tail = b""

    def finish_at_once(self, exchange: Exchange, body: bytes) -> None:
        """The same for a body in one piece, which is all that came: a third of the price."""
        exchange.response_bytes = len(body)
        exchange.chunks = 1
        path = exchange.request.path
        exchange.usage = usage_from(body, path)
        if path.startswith("/v1/responses"):
            exchange.response_id = response_id_from(body)
        self.pieces.clear()

    def take(self) -> bytes:
        """All of the body, for whoever settles nothing: the meter is ready for the next answer."""
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.marks.clear()
        return body


def _look_for_id(exchange: Exchange, beginning: bytes) -> None:
    if exchange.response_id is None and exchange.response_bytes < BEGINNING:
        exchange.response_id = response_id_from(beginning)
