"""One connection to a pod: parses its answers only as far as needed to know where they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from proxy.core.errors import UpstreamFailed
from proxy.http.framing import CLOSED, OPENED, Bodies, Marks

HEAD_LIMIT = 256 * 1024
"""Bytes that the head of an answer may take, informational ones before it included."""

HEAD_END = b"\r\n\r\n"


class Garbled(UpstreamFailed):
    """What the pod sent is not HTTP."""


class Disconnected(UpstreamFailed):
    """The pod closed the connection before its answer was whole. `silent`: before a byte of it."""

    def __init__(self, message: str, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class Receiver(Protocol):
    """Who gets an answer: one `head`, then reads of its body, the last one by `finished`; or `failed` at any point."""

    def head(self, status: int, lines: list[bytes]) -> bool:
        """The lines of the head, status line first. Says whether the body ends with the connection. Raises
        UpstreamFailed for a head that it cannot relay."""

    def received(self, raw: bytes, bodies: Bodies, marks: Marks) -> None:
        """The lists are reused after the call."""

    def finished(self, raw: bytes, bodies: Bodies, marks: Marks, exact: bool) -> None: ...

    def upgraded(self, rest: bytes) -> None:
        """From here on the connection belongs to whoever calls `Connection.splice`."""

    def failed(self, error: UpstreamFailed) -> None: ...

    def pause_writing(self) -> None:
        """The pod does not keep up with the request's body."""

    def resume_writing(self) -> None: ...


class Connection(asyncio.Protocol):
    """idle -> sending -> answering -> idle, until closed. An idle one has no receiver.

    The parser is kept for the connection's life and calls C functions only while a body goes by: the pieces and the
    edges of chunks are collected by `list.append`, which is a third of the cost of methods of ours.
    """

    __slots__ = (
        "_bodies",
        "_complete",
        "_feed",
        "_head_only",
        "_informational",
        "_keep",
        "_lost",
        "_marks",
        "_parser",
        "_raw",
        "_reading",
        "_receiver",
        "_release",
        "_status",
        "_until_close",
        "idle_since",
        "on_body",
        "on_chunk_complete",
        "on_chunk_header",
        "request_sent",
        "transport",
    )

    def __init__(self, release: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        """`release` gets the connection back when it can be used again, `lost` is told when it closed while idle."""
        self._release = release
        self._lost = lost
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self._receiver: Receiver | None = None
        self._reading = True
        self._bodies: list[bytes] = []
        self._marks: list[int] = []
        self.on_body = self._bodies.append
        self.on_chunk_header = partial(self._marks.append, OPENED)
        self.on_chunk_complete = partial(self._marks.append, CLOSED)
        self._parser = HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._expect_answer()

    def _expect_answer(self) -> None:
        self._raw: bytes | None = b""
        """What came of the head; None when it has been passed on."""
        self._informational = 0
        self._status = 0
        """0 until the head of the final answer is complete."""
        self._complete = False
        self._until_close = False
        self._keep = False

    def send(self, receiver: Receiver, head: bytes, body: bytes, whole: bool = True, head_only: bool = False) -> None:
        """A request; its answer is pushed to `receiver`. If the body is not `whole`, the rest follows by `write`.
        `head_only` says that the answer has no body, whatever its head says (HEAD)."""
        self._expect_answer()
        self._receiver = receiver
        self.request_sent = whole
        self._head_only = head_only
        if len(body) < 16 * 1024:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def abort(self) -> None:
        """The answer is not wanted any more: the pod sees its client leave."""
        self._receiver = None
        self.transport.abort()

    def pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    def splice(self, protocol: asyncio.Protocol) -> None:
        """Hands the socket over."""
        self._receiver = None
        self.transport.set_protocol(protocol)

    def is_usable(self) -> bool:
        return not self.transport.is_closing()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.transport.abort()  # a pod that speaks unasked cannot be understood afterwards
            return
        error: Exception | None = None
        try:
            self._feed(data)
        except HttpParserUpgrade:
            self._upgrade(receiver, (self._raw or b"") + data)
            return
        except HttpParserError as caught:
            error = caught
        if self._complete:
            self._finish(receiver, data, error is None)
        elif error is not None:
            self._fail(Garbled(f"not an HTTP answer: {error}"))
        elif self._raw is not None:
            self._before_body(receiver, data)
        else:
            receiver.received(data, self._bodies, self._marks)
            self._bodies.clear()
            self._marks.clear()

    def eof_received(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        receiver = self._receiver
        if receiver is None:
            self._lost(self)
            return
        self._receiver = None
        if self._until_close and error is None:
            receiver.finished(b"", (), (), True)
            return
        silent = not self._status and not self._raw
        receiver.failed(Disconnected(f"connection lost: {error or 'closed by the pod'}", silent))

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.resume_writing()

    # what the parser calls

    def on_message_begin(self) -> None:
        if self._complete:
            raise Garbled("more than one answer")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            self._informational += 1
        else:
            self._status = status

    def on_message_complete(self) -> None:
        if self._status:
            self._complete = True
            self._keep = self._parser.should_keep_alive()

    # from here on in order of the life of an answer

    def _before_body(self, receiver: Receiver, data: bytes) -> None:
        """Collects the head; when it is there, passes on what came with it."""
        raw = (self._raw or b"") + data
        if not self._status:
            self._raw = raw
            if len(raw) > HEAD_LIMIT:
                self._fail(Garbled("the head of the answer is too long"))
            return
        rest = self._pass_head(receiver, raw)
        if rest is None:
            return
        if self._head_only:
            self._complete = True
            self._finish(receiver, b"", False)
            return
        receiver.received(rest, self._bodies, self._marks)
        self._bodies.clear()
        self._marks.clear()

    def _pass_head(self, receiver: Receiver, raw: bytes) -> bytes | None:
        """What follows the head in `raw`; None if it could not be relayed."""
        self._raw = None
        try:
            head, _, raw = raw.lstrip(b"\r\n").partition(HEAD_END)
            for _ in range(self._informational):
                head, _, raw = raw.lstrip(b"\r\n").partition(HEAD_END)
            self._until_close = receiver.head(self._status, head.split(b"\r\n"))
        except UpstreamFailed as error:
            self._fail(error)
            return None
        return raw

    def _finish(self, receiver: Receiver, data: bytes, exact: bool) -> None:
        if self._raw is not None:
            rest = self._pass_head(receiver, self._raw + data)
            if rest is None:
                return
            data = rest
        receiver.finished(data, self._bodies, self._marks, exact)
        self._receiver = None
        self._bodies.clear()
        self._marks.clear()
        sent = self.request_sent and not self.transport.get_write_buffer_size()
        if self._keep and exact and sent and not self.transport.is_closing():
            self.resume_reading()
            self._release(self)
        else:
            self.transport.abort()

    def _upgrade(self, receiver: Receiver, raw: bytes) -> None:
        rest = self._pass_head(receiver, raw)
        if rest is not None:
            receiver.upgraded(rest)

    def _fail(self, error: UpstreamFailed) -> None:
        receiver, self._receiver = self._receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.failed(error)
