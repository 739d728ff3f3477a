"""What an attempt learns from the body of its answer. What came is added up now and then, not read by read."""

from __future__ import annotations

from proxy.core.attempt import Attempt
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

    def settle(self, attempt: Attempt) -> None:
        """Adds what came to the attempt. Chunks are HTTP chunks, or reads of a body without."""
        pieces, marks = self.pieces, self.marks
        body = b"".join(pieces)
        if attempt.request.path.startswith("/v1/responses"):
            _look_for_id(attempt, self.tail + body)
        attempt.response_bytes += len(body)
        if marks:
            attempt.chunks += sum(marks)  # each CLOSED is 1, and an OPENED 0: half of what it takes to count them
            marks[:] = (OPENED,)
        else:
            attempt.chunks += len(pieces)
        self.tail = body[-TAIL:] if len(body) > TAIL else (self.tail + body)[-TAIL:]
        pieces.clear()

    def finish(self, attempt: Attempt) -> None:
        """The answer is whole: the meter is ready for the next one."""
        if self.marks:
            attempt.chunks -= 1  # the last one only says that there are no more
        self.settle(attempt)
        request = attempt.request
        ends_soon = request.stream and request.path in USAGE_LAST
        attempt.usage = usage_from(self.tail[-USAGE_WITHIN:] if ends_soon else self.tail, request.path)
        self.marks.clear()
        self.tail = b""

    def finish_at_once(self, attempt: Attempt, body: bytes) -> None:
        """The same for a body in one piece, which is all that came: a third of the price."""
        attempt.response_bytes = len(body)
        attempt.chunks = 1
        path = attempt.request.path
        attempt.usage = usage_from(body, path)
        if path.startswith("/v1/responses"):
            attempt.response_id = response_id_from(body)
        self.pieces.clear()

    def take(self) -> bytes:
        """All of the body, for whoever settles nothing: the meter is ready for the next answer."""
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.marks.clear()
        return body


def _look_for_id(attempt: Attempt, beginning: bytes) -> None:
    if attempt.response_id is None and attempt.response_bytes < BEGINNING:
        attempt.response_id = response_id_from(beginning)
