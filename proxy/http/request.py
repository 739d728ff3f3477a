"""Requests of clients: heads as aiohttp's parser reads them, and what a request carries until its response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from aiohttp import StreamReader
from aiohttp.http import HttpProcessingError, HttpRequestParser, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from proxy.core.ports import Identity
from proxy.http.guards import reset
from proxy.http.head import REMEMBERED, Pairs, first_lines, local_answer, passing
from proxy.http.paths import split_target

if TYPE_CHECKING:
    from proxy.http.body import Upload
    from proxy.http.client import ClientConnection
    from proxy.http.pipeline import Continuation


Body = StreamReader
"""The rest of a body, as it comes: `readany` it."""

Head = RawRequestMessage
UNREAD = RawRequestMessage(
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
"""The head of what is answered, though it could not be read."""

HTTP_11 = HttpVersion11
"""The one object that the parser has for it."""

Parser = HttpRequestParser
ParserError = HttpProcessingError

HEAD_LIMIT = 64 * 1024
"""Bytes of a request line and all header fields together. The largest heads of real clients have tokens, cookies and
baggage of some 8 KiB each."""

MOST_FIELDS = 128
"""As the parser has it, if it is not told otherwise."""

STREAM_LIMIT = 256 * 1024
"""Bytes of a body that wait to be read; at twice as many, reading pauses."""


class BodyBroke(Exception):
    """What reading a body raises where its framing is broken."""


def is_spaced(head: bytes) -> bool:
    """Whether the request line has two spaces in a row: to the parser that is one. An empty line may precede it."""
    return head.find(b"  ", 0, head.find(b"\r\n", 2)) >= 0


def is_too_large(error: ParserError) -> bool:
    """Whether a head is in order, but for its size; of the number of fields the parser tells by a sentence alone."""
    return isinstance(error, LineTooLong) or error.message.startswith("Too many headers")


def size_of(head: Head) -> int:
    """Return the bytes of a request line and its header fields."""
    return len(head.path) + sum(len(name) + len(value) + 4 for name, value in head.raw_headers)


def head_parser(loop: asyncio.AbstractEventLoop) -> Parser:
    """For heads alone, each fed whole. To let aiohttp read the body too takes a stream and its calls into Python, 250
    bytecodes for what mostly is one slice of bytes. The switch is meant for answers to HEAD; to a parser of requests it
    says that the next message follows the head."""
    return _parser(None, loop, response_with_body=False)


def whole_parser(reader: ClientConnection, loop: asyncio.AbstractEventLoop) -> Parser:
    """For requests in any framing and any pieces. It stops behind each one and keeps what follows until it is fed
    again: a read full of small requests would be as many objects at once."""
    return _parser(reader, loop, max_msg_queue_size=1)


def body_stream(reader: ClientConnection, loop: asyncio.AbstractEventLoop) -> Body:
    """For a body of declared length, whose end is found by counting."""
    protocol: Any = reader  # aiohttp uses `connected`, `pause_reading` and `resume_reading`
    return StreamReader(protocol, STREAM_LIMIT, loop=loop)


def _parser(reader: ClientConnection | None, loop: asyncio.AbstractEventLoop, **more: Any) -> Parser:
    protocol: Any = reader
    return HttpRequestParser(
        protocol,
        loop,
        STREAM_LIMIT,
        max_line_size=HEAD_LIMIT,
        max_field_size=HEAD_LIMIT,
        auto_decompress=False,
        **more,
    )


HEAD_END = b"\r\n\r\n"

HTTP_10 = (1, 0)

HEADS = 256
"""That are remembered, of REMEMBERED bytes at most."""

_USUAL_VERSION = b" HTTP/1.1\r\n"
"""Stands behind as many bytes as method, a space and target have, if there is one space each and nothing before."""

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: (\d{1,15})(?=\r\n[^ \t]|\Z)").match
"""A whole line of a head. What it is looked for by, for a third of what a search takes, stands so far in it:"""

_SOUGHT = b"ength: "
_SOUGHT_AT = len(b"\r\nContent-L")


MOST_BEGINNINGS = 64
"""Beginnings of heads towards pods that are kept for each head of a client."""


class RequestHead:
    """All that is the same in requests of the same head; nobody changes it."""

    __slots__ = (
        "_beginnings",
        "chunked",
        "closing",
        "headers",
        "id",
        "length",
        "method",
        "path",
        "query",
        "raw_headers",
        "speaks_11",
        "target",
        "wants_websocket",
    )

    def __init__(self, head: Head) -> None:
        self.method = head.method
        self.path, self.query = split_target(head.path)
        self.target = self.path + self.query
        self.headers: Mapping[str, str] = head.headers
        length = self.headers.get("content-length")
        self.length = None if length is None else int(length)
        """Of the body, as declared; the parser has checked that it is a number."""
        self.raw_headers = head.raw_headers
        self.speaks_11 = (version := head.version) is HTTP_11 or version > HTTP_10
        """An older client knows neither chunks nor informational answers."""
        self.id = self.headers.get("x-request-id") or ""
        self.closing: bool = head.should_close
        """Whether this is the connection's last answer."""
        self.chunked = head.chunked
        self.wants_websocket = head.upgrade and self.headers.get("upgrade", "").lower() == "websocket"
        self._beginnings: dict[tuple[bytes, bytes, bool], bytes] = {}

    def beginning(self, base: bytes, host: bytes, authorized: bool) -> bytes:
        """Return the head towards the pod at this base path and host, without the fields of each request."""
        found = self._beginnings.get((base, host, authorized))
        if found is None:
            if len(self._beginnings) >= MOST_BEGINNINGS:
                self._beginnings.clear()
            found = first_lines(self.method, self.target, base, host) + passing(self.raw_headers, authorized)
            self._beginnings[base, host, authorized] = found
        return found


class Heads:
    """Reads the usual ones: HTTP/1.1, and a body of declared length.

    A client's requests differ in the length of their bodies, and hardly in anything else of their heads. So that is
    taken out, and what is left looked up: 7,000 instructions where the parser and what follows from it take 22,000.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser: Parser | None = None
        self._read_again = lru_cache(HEADS)(self._read)

    def read(self, head: bytes) -> tuple[RequestHead, int | None] | None:
        """And the length of the body, if one is declared. None if it is not a usual one, or none at all. `head` is
        without the empty line at its end."""
        at = head.rfind(_SOUGHT) - _SOUGHT_AT
        length = _LENGTH(head, at) if at > 0 and len(head) <= REMEMBERED else None
        if length is None:
            found = (self._read_again if len(head) <= REMEMBERED else self._read)(head)
            return None if found is None else (found, found.length)
        found = self._read_again(head[:at] + head[length.end() :])
        if found is None or found.length is not None:
            return None
        return found, int(length[1])

    def _read(self, head: bytes) -> RequestHead | None:
        head += HEAD_END
        parser = self._parser or head_parser(self._loop)
        self._parser = None
        try:
            [(message, _)], upgraded, _ = parser.feed_data(head)
        except (ParserError, ValueError):  # ValueError: not exactly one
            return None
        if not message.should_close and not upgraded:
            self._parser = parser  # any other takes nothing more, and the next head is another connection's
        if message.version is not HTTP_11 or message.method == "CONNECT" or "transfer-encoding" in message.headers:
            return None
        if len(head) > HEAD_LIMIT and size_of(message) > HEAD_LIMIT:
            return None
        behind = len(message.method) + 1 + len(message.path)
        if head[behind : behind + len(_USUAL_VERSION)] != _USUAL_VERSION:
            return None
        return RequestHead(message)


class HttpCall:
    """Implements `core.ports.Call`."""

    def __init__(
        self,
        head: RequestHead,
        length: int | None,
        connection: ClientConnection,
        ids: Iterator[str],
        received_at: float,
    ) -> None:
        """`length` is that of its body, as declared. `ids` are for requests that bring none. `received_at` is when the
        head was whole, in monotonic seconds."""
        self.head = head
        self.content_length = length
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        """`content-length` may have been taken out."""
        self.raw_headers = head.raw_headers
        self.speaks_11 = head.speaks_11
        self.connection = connection
        self.transport = connection.socket
        self.id = head.id or next(ids)
        self.id_line = f"x-request-id: {self.id}\r\n".encode("utf-8", "surrogateescape")
        self.received_at = received_at
        self.closing = head.closing
        self.chunked = head.chunked
        self.wants_websocket = head.wants_websocket
        self.body = b""
        self.payload: Body | None = None
        """Has the body if it is not collected before it is served."""
        self.retained = 0
        """Bytes that its body takes of the budget."""
        self.upload: Upload | None = None
        """The rest of a body that is streamed."""
        self.answered = 0
        """The status that was sent; 0: nothing was."""
        self.sent = 0
        """Bytes of body in an answer of our own."""
        self.answer_lines = b""
        """Of every answer, a pod's or our own."""
        self.identity: Identity | None = None
        self.continuation: Continuation | None = None
        """Of an answer that may go on with another pod."""

    def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        """Sends a whole answer, if the client is still there. It is the last one if the request was not read whole."""
        if self.transport.is_closing():
            return
        if self.payload is not None and not self.payload.is_eof():
            self.closing = True
        self.answered = status
        self.sent = len(body)
        head_only = self.method == "HEAD"
        self.transport.write(
            local_answer(
                status,
                headers,
                body,
                connection=self.answer_lines + self.connection_header(),
                head_only=head_only,
            )
        )

    @property
    def has_left(self) -> bool:
        """The client has."""
        return self.transport.is_closing()

    def break_off(self) -> None:
        self.closing = True
        reset(self.transport)

    def end(self) -> None:
        """Of one that was served."""
        self.connection.answered(self)

    def connection_header(self) -> bytes:
        if self.closing:
            return b"connection: close\r\n"
        return b"" if self.speaks_11 else b"connection: keep-alive\r\n"
