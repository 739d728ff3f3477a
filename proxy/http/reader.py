"""Readers of requests, which find each request in the bytes of a connection."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import LineTooLong
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from proxy.core.errors import BodyTimeout, HeadTimeout, HeadTooLarge, InvalidHttp, RequestError, Saturated
from proxy.http.body import BODY_LATE, FREE_BUFFER, JOINED, NO_MEMORY, is_too_slow
from proxy.http.request import (
    HEAD_END,
    HEAD_LIMIT,
    STREAM_LIMIT,
    Body,
    BodyBroken,
    Head,
    HttpRequest,
    ParserError,
    RequestHead,
    new_parser,
    size_of,
)

if TYPE_CHECKING:
    from proxy.http.client_connection import ClientConnection
    from proxy.http.server import DataServer


USUAL_HEAD = 2 * 1024
"""Bytes of a read in which the end of a head is looked for at first."""


class RequestReader:
    """The base of the readers, which call `start` of their connection for each request, and `refuse` for anything
    else. By itself it discards all bytes: a connection that closes gets one."""

    __slots__ = ()

    may_hold_bytes = False
    """Whether it may have bytes behind a request, which it reads when it is fed again."""

    def feed(self, data: memoryview) -> None:
        """Take bytes between requests, the first bytes of the next one among them."""

    def leftover(self) -> bytes:
        """Return the bytes that it has kept from behind a request to upgrade."""
        return b""

    def check(self, now: float) -> bool:
        """Return whether a request has begun to come. Refuse it if it has stalled. Called by the sweep between
        requests."""
        return False


class ContentLengthReader(RequestReader):
    """The reader of a new connection: heads that come in one read, bodies whose length is declared. At the first other
    request it makes way for GeneralReader. A body that comes in several reads is collected before its request is
    served, if the request is authenticated and the budget has memory at once. Otherwise the request is served from its
    head on and its body is a stream, which is slower."""

    __slots__ = ("_connection", "_left", "_loop", "_pieces", "_quiet_since", "_server")

    def __init__(self, connection: ClientConnection, server: DataServer, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._server = server
        self._loop = loop
        self._left = 0
        """Missing bytes of a body."""
        self._pieces: list[bytes] = []
        """The collected pieces of a body."""
        self._quiet_since: float | None = None
        """When the sweep first saw no progress."""

    def feed(self, data: memoryview) -> None:
        connection, server = self._connection, self._server
        head, end, rest = (data if len(data) <= USUAL_HEAD else data[:USUAL_HEAD]).tobytes().partition(HEAD_END)
        if end and len(data) > USUAL_HEAD:
            rest = data[len(head) + len(HEAD_END) :].tobytes()
        elif not end:
            head, end, rest = data.tobytes().partition(HEAD_END)
        read = server.heads.read(head) if end else None
        if read is None:
            connection.reader = GeneralReader(connection, server, self._loop)
            connection.reader.feed(data)
            return
        message, length = read
        client_request, size = HttpRequest(message, length, connection, server.ids, server.now()), length or 0
        if len(head) > FREE_BUFFER:
            connection.head_size = len(head)
            if not connection.count():
                connection.refuse(client_request, Saturated(NO_MEMORY))
                return
        if len(rest) == size:
            client_request.body = rest
            connection.start(client_request)
        else:
            self._start_in_part(client_request, rest, size)

    def check(self, now: float) -> bool:
        """Refuse a body that makes no progress within the timeout."""
        client_request = self._connection.client_request
        if client_request is None:
            return False
        settings, received = self._server.settings, (client_request.content_length or 0) - self._left
        if self._quiet_since is None:
            self._quiet_since = now
        is_slow = is_too_slow(received, now - client_request.received_at, settings.body_timeout, settings.min_body_rate)
        if is_slow or now - self._quiet_since > settings.body_timeout:
            self._connection.refuse(client_request, BodyTimeout(BODY_LATE))
        return True

    def _start_in_part(self, client_request: HttpRequest, data: bytes, size: int) -> None:
        """Handle a request with less or more than its body."""
        connection = self._connection
        if len(data) > size:
            client_request.body = data[:size]
            connection.start(client_request)
            connection.hold(data[size:])
            return
        self._left = size
        if self._server.prepare_collecting(client_request, size):
            connection.client_request = client_request
            connection.consume = partial(self._collect, client_request)
        else:
            protocol: Any = connection  # aiohttp uses `connected`, `pause_reading` and `resume_reading`
            client_request.payload = body = Body(protocol, STREAM_LIMIT, loop=self._loop)
            connection.start(client_request)
            connection.consume = partial(self._stream, body)
        if data:
            connection.consume(memoryview(data))

    def _collect(self, client_request: HttpRequest, data: memoryview) -> None:
        """Collect a piece. Nothing is copied until the body is complete, unless there are very many pieces."""
        pieces = self._pieces
        pieces.append(data.tobytes())
        if len(pieces) > JOINED:
            pieces[:] = (b"".join(pieces),)
        self._quiet_since = None
        self._left = left = self._left - len(data)
        if left > 0:
            return
        body, behind = b"".join(pieces), b""
        pieces.clear()
        if left:
            body, behind = body[:left], body[left:]
        client_request.body = body
        self._connection.start(client_request)
        if behind:
            self._connection.hold(behind)

    def _stream(self, body: Body, data: memoryview) -> None:
        left = self._left
        self._left = left - len(data)
        body.feed_data(data[:left].tobytes())
        if self._left <= 0:
            self._connection.consume = self._connection.hold
            body.feed_eof()
            self._connection.hold(data[left:])


FRAMING_LIMIT = 16 * 1024
FRAMING_RATIO = 8
"""Bytes on the wire that a chunked body may use per byte of content, and the same number in addition."""

SLICE = 16 * 1024
"""Bytes that the parser is fed at once. It holds the bytes after the end of a request, where they cannot be counted."""

HEAD_COPIES = 2
"""The parser keeps each field of a head as bytes and as text."""

VERSIONS = ((1, 0), (1, 1))

MOST_FIELDS = 128
"""Largest number of header fields, as in the parser."""

UNREAD = Head(
    method="",
    path="",
    version=HttpVersion11,
    headers=CIMultiDictProxy(CIMultiDict()),
    raw_headers=(),
    should_close=True,
    compression=None,
    upgrade=False,
    chunked=False,
    url=URL(),
)
"""The head of a request that could not be read but gets a response."""

UNREADABLE = "The request could not be read: "
SPACED = "between method, target and version is one space each"


class GeneralReader(RequestReader):
    """The reader of a connection after ContentLengthReader, from the first request on that the latter cannot read, such
    as a head in several reads or a chunked body. It receives all bytes, except between the end of a body and the
    response: the connection holds these."""

    __slots__ = ("_begun_at", "_connection", "_fed", "_first", "_head", "_is_upgrade", "_parser", "_server", "_stopped")

    may_hold_bytes = True
    """The parser stops after each request."""

    def __init__(self, connection: ClientConnection, server: DataServer, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._server = server
        # It stops after each request and keeps the following bytes until it is fed again, so that a read of many small
        # requests does not create as many objects.
        self._parser = new_parser(connection, loop, max_msg_queue_size=1)
        self._begun_at: float | None = None
        """When the first byte of an incomplete head arrived."""
        self._fed = 0
        """Bytes of the body, including the framing, since the read with its head."""
        self._head = 0
        """Bytes of an incomplete head."""
        self._stopped = False
        """Whether the parser stopped after a request and may hold bytes."""
        self._is_upgrade = False
        """Whether the last request asked for an upgrade. After such a request the parser keeps the following bytes
        until the upgrade is decided; kvlane refuses it, or the connection becomes a tunnel."""
        self._first: bytes | None = b""
        """The start of the first line; None once it has been checked. Only the parser knows where later lines start."""

    def feed(self, data: memoryview) -> None:
        connection = self._connection
        if self._first is not None and self._is_spaced(data):
            self._refuse_invalid(_unread(SPACED))
            return
        connection.consume = self.feed
        if self._stopped:
            if self._is_upgrade:
                self._is_upgrade = False
                self._parser.set_upgraded(True)  # it returns the following bytes, which are parsed again
            if not self._parse(b""):
                return
        for start in range(0, len(data), SLICE):
            if self._stopped:
                connection.hold(data[start:])
                return
            if not self._parse(data[start : start + SLICE].tobytes()):
                return

    def _parse(self, data: bytes) -> bool:
        """Parse a slice. Return False if the connection accepts no more bytes."""
        connection = self._connection
        self._stopped = False
        try:
            messages, upgraded, tail = self._parser.feed_data(data)
            if upgraded:  # was asked for, and refused
                self._parser.set_upgraded(False)
                messages, upgraded, tail = self._parser.feed_data(tail)
        except ParserError as error:
            # The parser reports too many fields by its message only.
            is_too_large = isinstance(error, LineTooLong) or error.message.startswith("Too many headers")
            self._refuse_invalid(_too_large() if is_too_large else _unread(error.message.partition("\n")[0]))
            return False
        for message, body in messages:  # one at most
            if not self._serve(message, body, self._head + len(data)):
                return False
        client_request = connection.client_request
        if client_request is None:
            return self._count_head(len(data))
        if client_request.payload is None or client_request.payload.is_eof():
            self._stopped = True
            connection.consume = connection.hold
        elif not messages:
            self._fed += len(data)
            # A chunk of one byte takes six bytes; more are extensions, which no other limit counts.
            if self._fed > FRAMING_LIMIT + FRAMING_RATIO * client_request.payload.total_bytes:
                self._refuse_invalid(_unread("its chunks are more framing than body"))
                return False
        else:
            connection.consume = self.feed
        return True

    def leftover(self) -> bytes:
        return self._parser.feed_data(b"")[2]

    def check(self, now: float) -> bool:
        """Refuse a head that is not complete within the timeout, however steadily it arrives."""
        if self._begun_at is None:
            return False
        if now - self._begun_at > self._server.settings.head_timeout:
            self._refuse(HeadTimeout("The head of the request did not arrive in time."))
        return True

    def _is_spaced(self, data: memoryview) -> bool:
        """Return whether the first line, which an empty one may precede, contains two spaces in a row. The parser
        accepts that."""
        first = (self._first or b"") + data[:HEAD_LIMIT].tobytes()
        spaced = first.find(b"  ", 0, first.find(b"\r\n", 2)) >= 0
        self._first = None if b"\r\n" in first.lstrip(b"\r\n") or len(first) > HEAD_LIMIT else first
        return spaced

    def _serve(self, message: Head, body: Body, fed: int) -> bool:
        """Serve a request whose head is in the last `fed` bytes; return False if it is refused."""
        if fault := _fault(message):
            self._refuse(InvalidHttp(fault))
            return False
        if fed > HEAD_LIMIT and size_of(message) > HEAD_LIMIT:
            self._refuse(_too_large())
            return False
        self._begun_at = None
        self._is_upgrade = message.upgrade
        self._head = self._fed = 0
        head = RequestHead(message)
        client_request = HttpRequest(head, head.length, self._connection, self._server.ids, self._server.now())
        if body.is_eof():
            client_request.body = body.read_nowait()
        else:
            client_request.payload = body
        self._connection.start(client_request)
        return True

    def _count_head(self, size: int) -> bool:
        """Count `size` more bytes of an incomplete head. Refuse it and return False if it is too large."""
        if not size:
            return True
        if self._begun_at is None:
            self._begun_at = self._server.now()
            self._connection.idle_since = None
        self._head += size
        if self._head > HEAD_LIMIT:
            self._refuse(_too_large())
            return False
        if self._head > FREE_BUFFER:
            self._connection.head_size = HEAD_COPIES * self._head
            if not self._connection.count():
                self._refuse(Saturated(NO_MEMORY))
                return False
        return True

    def _refuse_invalid(self, error: RequestError) -> None:
        """Refuse invalid HTTP and close: the start of the next request is unknown."""
        client_request = self._connection.client_request
        if client_request is None or client_request.payload is None:
            self._refuse(error)
        else:
            self._connection.forget()
            client_request.payload.set_exception(BodyBroken(error.message.removeprefix(UNREADABLE)))

    def _refuse(self, error: RequestError) -> None:
        """Refuse invalid input, which is counted and logged as a request."""
        since = self._server.now() if self._begun_at is None else self._begun_at
        self._connection.refuse(
            HttpRequest(RequestHead(UNREAD), None, self._connection, self._server.ids, since), error
        )


def _unread(why: str) -> InvalidHttp:
    return InvalidHttp(UNREADABLE + why)


def _too_large() -> HeadTooLarge:
    """Return the error without the oversized text, which may be a key."""
    return HeadTooLarge(
        f"The head of the request is too large: it may have {HEAD_LIMIT} bytes and {MOST_FIELDS} header fields."
    )


def _fault(head: Head) -> str:
    """Return the error of a request that the parser accepts but other servers read differently or not at all; empty
    without an error. The transfer codings of a body stay behind with its framing, so a coding that is not decoded here
    would reach the pod undeclared."""
    if head.version not in VERSIONS:
        return "Only the versions 1.0 and 1.1 of HTTP are supported."
    if head.method == "CONNECT":
        return "CONNECT is not supported."
    codings = head.headers.getall("transfer-encoding", ())
    if codings and (head.version == VERSIONS[0] or [each.strip().lower() for each in codings] != ["chunked"]):
        return "The only supported transfer coding of a request is chunked, and HTTP/1.0 has none."
    return ""
