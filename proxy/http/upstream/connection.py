"""One connection to a pod: parses its responses only as far as needed to know where they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from proxy.core.attempt import Attempt, Usage
from proxy.core.errors import Disconnected, InvalidResponse, UpstreamFailed
from proxy.http.framing import CLOSED, OPENED
from proxy.http.guards import guarded
from proxy.http.head import REMEMBERED, ResponseHead, read_response_head
from proxy.openai.events import (
    DONE,
    MESSAGES,
    USAGE_LAST,
    USAGE_WITHIN,
    is_truncated,
    response_id_from,
    usage_at_start,
    usage_from,
)

log = logging.getLogger(__name__)


TAIL = 8 * 1024
"""Bytes at the end of a body that are kept, because they contain the usage."""

BEGINNING = 8 * 1024
"""Bytes in which the id of a stored response is searched."""


class ResponseMeter:
    """Measures one response after the other of a pod's connection. The parser appends to `pieces` the parts of the body
    and to `marks` the edges of HTTP chunks since the last `flush`. After a flush within a chunked body, `marks` starts
    with OPENED, so that there is a last one."""

    __slots__ = ("_start", "marks", "pieces", "tail")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.marks: list[int] = []
        self.tail = b""
        """The end of the body before `pieces`."""
        self._start: Usage | None = None
        """The usage at the start of a streamed message."""

    def flush(self, attempt: Attempt) -> None:
        """Add the received data to the attempt. Chunks are HTTP chunks, or reads of a body without chunks."""
        pieces, marks = self.pieces, self.marks
        body = b"".join(pieces)
        is_beginning = attempt.response_id is None and attempt.response_bytes < BEGINNING
        if is_beginning and attempt.request.path.startswith("/v1/responses"):
            attempt.response_id = response_id_from(self.tail + body)
        if not attempt.request.stream:  # its usage may be anywhere
            attempt.usage = usage_from(self.tail + body, attempt.request.path) or attempt.usage
        elif attempt.request.path == MESSAGES and not attempt.response_bytes:
            self._start = usage_at_start(body[:BEGINNING])
        attempt.response_bytes += len(body)
        if marks:
            attempt.chunks += sum(marks)  # each CLOSED is 1, and an OPENED 0: half of what it takes to count them
            marks[:] = (OPENED,)
        else:
            attempt.chunks += len(pieces)
        self.tail = body[-TAIL:] if len(body) > TAIL else (self.tail + body)[-TAIL:]
        pieces.clear()

    def finish(self, attempt: Attempt) -> None:
        """Add the complete response to the attempt and prepare for the next one."""
        if self.marks:
            attempt.chunks -= 1  # the last one only says that there are no more
        self.flush(attempt)
        request = attempt.request
        if request.stream and self._start is not None:
            attempt.usage = self.usage_at_end(attempt)
        elif request.stream:  # as there, without its frame; `flush` has found the usage of other responses
            attempt.usage = usage_from(
                self.tail[-USAGE_WITHIN:] if request.path in USAGE_LAST else self.tail, request.path
            )
        self.marks.clear()
        self.tail, self._start = b"", None

    def usage_at_end(self, attempt: Attempt) -> Usage | None:
        """Return the usage of a complete stream. Some engines, such as llama.cpp, report the prompt of a message at its
        start only."""
        path, start = attempt.request.path, self._start
        usage = usage_from(self.tail[-USAGE_WITHIN:] if path in USAGE_LAST else self.tail, path)
        if usage is None or start is None or usage.prompt_tokens:
            return usage
        return Usage(start.prompt_tokens, usage.completion_tokens, start.cached_tokens)

    def finish_at_once(self, attempt: Attempt, body: bytes) -> None:
        """As `finish`, for a body in one piece, at a third of the cost."""
        attempt.response_bytes = len(body)
        attempt.chunks = 1
        path = attempt.request.path
        attempt.usage = usage_from(body, path)
        if path.startswith("/v1/responses"):
            attempt.response_id = response_id_from(body)
        self.pieces.clear()

    def is_truncated(self, attempt: Attempt) -> bool:
        """Return whether the body, which is an event stream, ended in order but incomplete."""
        last = self.pieces[-1] if self.pieces else b""
        if last.startswith(DONE) or last.find(b"\n" + DONE) >= 0:
            return False
        return is_truncated(attempt.request.path, self.tail + b"".join(self.pieces))

    def pop(self) -> bytes:
        """Return the body since the last flush and prepare for the next response, without measuring it."""
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.marks.clear()
        self.tail, self._start = b"", None
        return body


class Receiver:
    """The consumer of a response: its head, then the reads of its body including the framing, the last one by
    `finished`; or `failed` at any point. The connection's meter has what the parser found. The methods that do nothing
    here are for rare events."""

    head: ResponseHead | None = None
    """The head as the connection has read it; None before that and after it has been relayed."""
    changes_body = False
    """Whether the body may be changed, or continue another response. Then `head_received` is called for simple
    responses too."""

    def head_received(self, head: ResponseHead) -> None:
        """Receive the head of a response that is not simple. Raise UpstreamFailed if it cannot be relayed."""

    def received(self, raw: bytes) -> None:
        """Receive a read. It may replace `PodConnection.receive` by another function."""

    def finished(self, raw: bytes, exact: bool) -> None:
        """Receive the last read. `exact`: nothing else follows in `raw`. Leave the meter flushed."""

    def upgraded(self, rest: bytes) -> None:
        """Give the connection to the caller of `PodConnection.splice`."""

    def failed(self, error: UpstreamFailed) -> None:
        """End the response, which is incomplete."""

    def internal_error(self, error: Exception) -> None:
        """Handle an error in one of these methods, which is a defect of the proxy; the connection is closed."""

    def pause_writing(self) -> None:
        """Pause the upload: the pod does not keep up."""

    def resume_writing(self) -> None:
        """Resume the upload."""


HEAD_LIMIT = 256 * 1024
"""Largest head of a response, in bytes."""

MOST_INFORMATIONAL = 100
"""Informational heads (1xx) before the head of a response."""

HEAD_END = b"\r\n\r\n"
LINE_FEED = ord("\n")

FLUSH_BYTES = 2 * TAIL
"""Bytes of chunks that bypass the receiver before the meter is flushed: 60 events or more at the cost of one."""


class PodConnection(asyncio.Protocol):
    """States: idle -> sending -> receiving -> idle, until closed. An idle one has no receiver. `receive` is called with
    every read and changes with the state of the response.

    The parser is kept for the connection's life and calls only C functions: `list.append` of the meter's lists, and
    `setattr` of `receive` at the end of a response. That is a third of the cost of Python methods.
    """

    def __init__(self, release: Callable[[PodConnection], None], lost: Callable[[PodConnection], None]) -> None:
        """`release` gets the connection back when it can be reused; `lost` is called when it closed while idle."""
        self._release = release
        self._lost = lost
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self.request_sent = True
        """Whether the whole body of the request was written; set by the sender of a stream."""
        self.meter = ResponseMeter()
        self.receive: Callable[[bytes], None] | None = self._beginning
        """None while chunks bypass the receiver: see `pass_chunks`."""
        self.bypassed = 0
        """Bytes of the current response that bypassed the receiver."""
        self._write: Callable[[bytes], None] = _unread
        self._bypass_until = 0
        self.head_only = False
        """The response has no body, whatever its head says (HEAD); the connection is not reused."""
        self.until_close = False
        """The body ends with the connection."""
        self._receiver: Receiver | None = None
        self._reading = True
        self._raw = b""
        """The received part of the head."""
        self._keeps_alive: bool | None = None
        """Whether the pod keeps the connection open; None until the head was passed on."""
        self._informational = 0
        """Number of informational heads before the head of the response."""
        self._begun: list[None] = []
        """Has one item for the permitted response. Taking from an empty list is an error, which stops the parser."""
        self.on_message_begin = self._begun.pop
        self.on_body = self.meter.pieces.append
        self.on_chunk_header = partial(self.meter.marks.append, OPENED)
        self.on_chunk_complete = partial(self.meter.marks.append, CLOSED)
        self.on_message_complete = partial(setattr, self, "receive", self._end)
        self._use_new_parser()

    def send(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        """Send a request; its response is pushed to `receiver`. More of the body may be written to `transport`."""
        self._receiver = receiver
        self._keeps_alive = None
        self._informational = 0
        self.bypassed = 0
        self._begun.append(None)
        self.receive = self._beginning
        if len(body) < 16 * 1024:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def abort(self) -> None:
        """Close the connection, so that the pod stops computing."""
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
        """Pass reads that end with a chunk to `write`, and other reads to the receiver; also one after FLUSH_BYTES
        bytes, which flushes the meter."""
        self._write = write
        self._bypass_until = self.bypassed + FLUSH_BYTES
        self.receive = None

    def splice(self, protocol: asyncio.Protocol) -> None:
        """Give the socket away."""
        self._let_go()
        self.transport.set_protocol(protocol)

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        feed = self._feed  # faster than calling a slot as a method
        try:
            try:
                feed(data)
            except HttpParserUpgrade:
                receiver = self._receiver
                if receiver is not None and (rest := self._pass_head(receiver, data)) is not None:
                    receiver.upgraded(rest)
            except HttpParserError as error:
                if self.receive == self._end:  # bytes after a complete response only cost the connection
                    self._end(data, exact=False)
                else:
                    self._fail(InvalidResponse(f"not an HTTP response: {error}"))
            else:
                receive = self.receive
                if receive is not None:
                    receive(data)
                    return
                bypassed = self.bypassed + len(data)
                # Behind a CLOSED there is no line feed but the chunk's. Comparing two bytes is slower.
                if self.meter.marks[-1] and data[-1] == LINE_FEED and bypassed < self._bypass_until:
                    self.bypassed = bypassed
                    write = self._write
                    write(data)
                elif self._receiver is not None:
                    self._receiver.received(data)
        except Exception as error:  # noqa: BLE001  # given to the receiver
            self.internal_error(error)

    @guarded
    def connection_lost(self, error: Exception | None) -> None:
        """Drop parser and callbacks: they refer to the connection in a cycle, which would keep it in memory."""
        del self._parser, self._feed, self.on_message_complete
        self.receive = _unread
        receiver = self._receiver
        if receiver is None:
            self._lost(self)
            return
        if self.until_close and error is None:
            receiver.finished(b"", True)
        else:
            silent = self._keeps_alive is None and not self._raw
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

    def internal_error(self, error: Exception) -> None:
        """Handle an error of a consumer of the response, which the task that waits for the response raises."""
        receiver = self._receiver
        self.abort()
        if receiver is None:
            log.error("failed to handle data of a pod; closed its connection", exc_info=error)
        else:
            receiver.internal_error(error)

    # what `receive` is, before the receiver's own functions and after them

    def _beginning(self, data: bytes) -> None:
        """Collect the head; then pass on the bytes after it."""
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
        """Receive the last read of a response; the only one of most that are no streams."""
        receiver = self._receiver
        if receiver is None:
            self.transport.abort()
            return
        rest = self._pass_head(receiver, data) if self._keeps_alive is None else data
        if rest is None:
            return
        if self.head_only:
            self.meter.pieces.clear()
            rest, exact = b"", False
        receiver.finished(rest, exact)
        self._receiver = None
        self._write = _unread
        if self._keeps_alive and exact and self.request_sent and not self.transport.get_write_buffer_size():
            if not self._reading:
                self.resume_reading()
            self._release(self)
        else:
            self.transport.abort()

    # what these share, and what is rare

    def _pass_head(self, receiver: Receiver, data: bytes) -> bytes | None:
        """Return the bytes after the head; None if it is incomplete or cannot be relayed."""
        if self._raw:
            data = self._raw + data
            self._raw = b""
        raw_head, end, rest = data.partition(HEAD_END)
        if not end:
            self._raw = data
            if len(data) > HEAD_LIMIT:
                self._fail(InvalidResponse("the head of the response is too long"))
            return None
        try:
            read = read_response_head if len(raw_head) <= REMEMBERED else read_response_head.__wrapped__
            head = read(raw_head)
            if not head.final:
                self._start_over(rest)
                return None
            self._keeps_alive = head.keeps_alive
            receiver.head = head
            if not head.simple or receiver.changes_body:
                receiver.head_received(head)
        except UpstreamFailed as error:
            self._fail(error)
            return None
        return rest

    def _start_over(self, rest: bytes) -> None:
        """Continue after an informational head: the parser took it for the response and stops at the next one. Raise
        InvalidResponse after MOST_INFORMATIONAL of them."""
        while True:
            self._informational += 1
            if self._informational > MOST_INFORMATIONAL:
                raise InvalidResponse(f"sent more than {MOST_INFORMATIONAL} informational heads before its response")
            head, end, after = rest.partition(HEAD_END)
            if not end or read_response_head(head).final:
                break
            rest = after
        self._use_new_parser()
        self._begun[:] = (None,)
        self.meter.pieces.clear()
        self.meter.marks.clear()
        self.receive = self._beginning
        self._raw = b"\r\n"  # the pod has begun
        if rest:
            self.data_received(rest)

    def _use_new_parser(self) -> None:
        """Accept white space after the size of a chunk, as aiohttp, curl and browsers do. It does not change where the
        response ends."""
        self._parser = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)
        self._feed = self._parser.feed_data

    def _let_go(self) -> None:
        """Drop the receiver: the cycle of connection and parser would keep it until garbage collection."""
        self._receiver = None
        self._write = _unread
        self.receive = self._beginning

    def _fail(self, error: UpstreamFailed) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.failed(error)


def _unread(data: bytes) -> None:
    pass
