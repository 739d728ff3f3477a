"""One connection to a pod: parses its responses only as far as needed to know where they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from proxy.core.attempt import Attempt
from proxy.core.errors import Disconnected, Garbled, UpstreamFailed
from proxy.http.framing import CLOSED, OPENED
from proxy.http.guards import guarded
from proxy.http.head import REMEMBERED, AnswerHead, read_answer_head
from proxy.openai.events import USAGE_LAST, USAGE_WITHIN, response_id_from, usage_from

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


class Receiver(Protocol):
    """Who gets an answer: its head, then what was read of its body, framing and all, the last by `finished`; or, at any
    point, `failed`. The connection's meter has what the parser made of it."""

    head: AnswerHead | None
    reads_head: bool
    """Whether `begin` gets the head of a simple answer too."""

    def begin(self, head: AnswerHead) -> None:
        """Of an answer that is not simple. Raises UpstreamFailed if it cannot be relayed."""

    def received(self, raw: bytes) -> None:
        """It may put another function in its place: `Connection.receive`."""

    def finished(self, raw: bytes, exact: bool) -> None:
        """`exact` says that nothing else follows in `raw`. It leaves the meter settled."""

    def upgraded(self, rest: bytes) -> None:
        """From here on the connection belongs to whoever calls `Connection.splice`."""

    def failed(self, error: UpstreamFailed) -> None: ...

    def broke(self, error: Exception) -> None:
        """One of these methods raised an error, which is a defect of the proxy; the connection is closed."""

    def pause_writing(self) -> None:
        """The pod does not keep up with the request's body."""

    def resume_writing(self) -> None: ...


log = logging.getLogger(__name__)

HEAD_LIMIT = 256 * 1024
"""Bytes that the head of an answer may take."""

MOST_INFORMATIONAL = 100
"""Informational heads (1xx) before the head of a response."""

HEAD_END = b"\r\n\r\n"
LINE_FEED = ord("\n")

MOST_PASSED = 2 * TAIL
"""Bytes of chunks that pass before the meter is settled: 60 events or more at its price."""


class Connection(asyncio.Protocol):
    """idle -> sending -> answering -> idle, until closed. An idle one has no receiver.

    Where an answer is, `receive` says: it is called with every read, and changes when the answer gets further. The
    parser is kept for the connection's life and calls nothing but C functions: `list.append` of the meter's lists, and
    `setattr` of `receive` when an answer is whole. That is a third of the cost of methods of ours.
    """

    __slots__ = (
        "_begun",
        "_feed",
        "_informational",
        "_keeps",
        "_lost",
        "_parser",
        "_raw",
        "_reading",
        "_receiver",
        "_release",
        "_settle_at",
        "_write",
        "head_only",
        "idle_since",
        "meter",
        "on_body",
        "on_chunk_complete",
        "on_chunk_header",
        "on_message_begin",
        "on_message_complete",
        "passed",
        "receive",
        "request_sent",
        "transport",
        "until_close",
    )

    def __init__(self, release: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        """`release` gets the connection back when it can be used again, `lost` is told when it closed while idle."""
        self._release = release
        self._lost = lost
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self.request_sent = True
        """Whether all of the request's body was given to `write`: whoever streams one says so."""
        self.meter = Meter()
        self.receive: Callable[[bytes], None] | None = self._beginning
        """None while chunks pass: see `pass_chunks`."""
        self.passed = 0
        """Bytes of them, of the present answer."""
        self._write: Callable[[bytes], None] = _unread
        self._settle_at = 0
        self.head_only = False
        """The answer has no body, whatever its head says (HEAD); then the connection is not used again."""
        self.until_close = False
        """The body ends with the connection."""
        self._receiver: Receiver | None = None
        self._reading = True
        self._raw = b""
        """What came of the head so far."""
        self._keeps: bool | None = None
        """Whether the pod lets it be used again; None until the head has been passed on."""
        self._informational = 0
        """Informational heads that came before the head of the response."""
        self._begun: list[None] = []
        """One for the answer that may begin. To take from an empty list is an error, which stops the parser."""
        self.on_message_begin = self._begun.pop
        self.on_body = self.meter.pieces.append
        self.on_chunk_header = partial(self.meter.marks.append, OPENED)
        self.on_chunk_complete = partial(self.meter.marks.append, CLOSED)
        self.on_message_complete = partial(setattr, self, "receive", self._end)
        self._parser = HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def send(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        """A request; its answer is pushed to `receiver`. More of the body may follow by `write`."""
        self._receiver = receiver
        self._keeps = None
        self._informational = 0
        self.passed = 0
        self._begun.append(None)
        self.receive = self._beginning
        if len(body) < 16 * 1024:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def abort(self) -> None:
        """The answer is not wanted any more: the pod sees its client leave."""
        self._let_go()
        self.transport.abort()

    def pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    def pass_chunks(self, write: Callable[[bytes], None]) -> None:
        """Give reads that end with a chunk to `write`, and other reads to the receiver; also one after MOST_PASSED
        bytes, so that it settles the meter."""
        self._write = write
        self._settle_at = self.passed + MOST_PASSED
        self.receive = None

    def splice(self, protocol: asyncio.Protocol) -> None:
        """Hands the socket over."""
        self._let_go()
        self.transport.set_protocol(protocol)

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        feed = self._feed  # to call what a slot has as if it were a method takes 100 instructions more
        try:
            try:
                feed(data)
            except HttpParserUpgrade:
                self._upgrade(data)
            except HttpParserError as error:
                self._break(data, error)
            else:
                receive = self.receive
                if receive is not None:
                    receive(data)
                    return
                passed = self.passed + len(data)
                # Behind a CLOSED there is no line feed but the chunk's. To ask for two bytes takes 500 instructions.
                if self.meter.marks[-1] and data[-1] == LINE_FEED and passed < self._settle_at:
                    self.passed = passed
                    write = self._write
                    write(data)
                elif self._receiver is not None:
                    self._receiver.received(data)
        except Exception as error:  # noqa: BLE001  # given to the receiver
            self.broke(error)

    def eof_received(self) -> None:
        pass

    @guarded
    def connection_lost(self, error: Exception | None) -> None:
        """Nothing is read any more: parser and callbacks, which know it as it knows them, would keep it in memory."""
        del self._parser, self._feed, self.on_message_complete
        self.receive = _unread
        receiver = self._receiver
        if receiver is None:
            self._lost(self)
            return
        if self.until_close and error is None:
            receiver.finished(b"", True)
        else:
            silent = self._keeps is None and not self._raw
            receiver.failed(Disconnected(f"connection lost: {error or 'closed by the pod'}", silent))
        self._let_go()

    @guarded
    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.pause_writing()

    @guarded
    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.resume_writing()

    def broke(self, error: Exception) -> None:
        """Something that the pod's answer was given to failed. The task that waits for the answer raises the error."""
        receiver = self._receiver
        self.abort()
        if receiver is None:
            log.error("failed to handle data of a pod; closed its connection", exc_info=error)
        else:
            receiver.broke(error)

    # what `receive` is, before the receiver's own functions and after them

    def _beginning(self, data: bytes) -> None:
        """Until the head is whole; then what came behind it is passed on."""
        receiver = self._receiver
        if receiver is None:
            self.transport.abort()  # a pod that speaks unasked cannot be understood afterwards
            return
        rest = self._pass_head(receiver, data)
        if rest is None:
            return
        if self.head_only:
            self._end(b"", exact=False)
        else:
            self.receive = receiver.received
            receiver.received(rest)

    def _end(self, data: bytes, exact: bool = True) -> None:
        """The last read of an answer; of most that are no streams, the only one."""
        receiver = self._receiver
        if receiver is None:
            self.transport.abort()
            return
        rest = self._pass_head(receiver, data) if self._keeps is None else data
        if rest is None:
            return
        if self.head_only:
            self.meter.pieces.clear()
            rest, exact = b"", False
        receiver.finished(rest, exact)
        self._receiver = None
        self._write = _unread
        if self._keeps and exact and self.request_sent and not self.transport.get_write_buffer_size():
            if not self._reading:
                self.resume_reading()
            self._release(self)
        else:
            self.transport.abort()

    # what these share, and what is rare

    def _pass_head(self, receiver: Receiver, data: bytes) -> bytes | None:
        """What follows the head in all that was read; None if it is not whole, or could not be relayed."""
        if self._raw:
            data = self._raw + data
            self._raw = b""
        raw_head, end, rest = data.partition(HEAD_END)
        if not end:
            self._wait_for_head(data)
            return None
        try:
            read = read_answer_head if len(raw_head) <= REMEMBERED else read_answer_head.__wrapped__
            head = read(raw_head)
            if not head.final:
                self._start_over(rest)
                return None
            self._keeps = head.keeps
            receiver.head = head
            if not head.simple or receiver.reads_head:
                receiver.begin(head)
        except UpstreamFailed as error:
            self._fail(error)
            return None
        return rest

    def _wait_for_head(self, raw: bytes) -> None:
        self._raw = raw
        if len(raw) > HEAD_LIMIT:
            self._fail(Garbled("the head of the answer is too long"))

    def _start_over(self, rest: bytes) -> None:
        """After an informational head: the parser took it for the answer, and stops at the next one. Raises Garbled
        after MOST_INFORMATIONAL of them."""
        self._count_informational()
        head, end, after = rest.partition(HEAD_END)
        while end and not read_answer_head(head).final:
            self._count_informational()
            rest = after
            head, end, after = rest.partition(HEAD_END)
        self._parser = HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._begun[:] = (None,)
        self.meter.pieces.clear()
        self.meter.marks.clear()
        self.receive = self._beginning
        self._raw = b"\r\n"  # the pod has begun
        if rest:
            self.data_received(rest)

    def _count_informational(self) -> None:
        self._informational += 1
        if self._informational > MOST_INFORMATIONAL:
            raise Garbled(f"sent more than {MOST_INFORMATIONAL} informational heads before its response")

    def _let_go(self) -> None:
        """Of the receiver: a connection is in a cycle with its parser, and would keep it until both are collected."""
        self._receiver = None
        self._write = _unread
        self.receive = self._beginning

    def _upgrade(self, data: bytes) -> None:
        receiver = self._receiver
        rest = None if receiver is None else self._pass_head(receiver, data)
        if receiver is not None and rest is not None:
            receiver.upgraded(rest)

    def _break(self, data: bytes, error: HttpParserError) -> None:
        """The parser stops. What follows an answer that is whole only costs the connection."""
        if self.receive == self._end:
            self._end(data, exact=False)
        else:
            self._fail(Garbled(f"not an HTTP answer: {error}"))

    def _fail(self, error: UpstreamFailed) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.failed(error)


def _unread(data: bytes) -> None:
    pass
