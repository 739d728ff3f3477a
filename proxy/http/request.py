"""Requests of clients: heads as aiohttp's parser reads them, and the state of a request until its response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import StreamReader
from aiohttp.http import HttpProcessingError, HttpRequestParser, HttpVersion11, RawRequestMessage

from proxy.core.ports import Identity
from proxy.http.guards import reset
from proxy.http.head import REMEMBERED, Pairs, encode_pairs, first_lines, passing
from proxy.http.paths import split_target

if TYPE_CHECKING:
    from proxy.http.body import Upload
    from proxy.http.client_connection import ClientConnection
    from proxy.http.pipeline import Continuation


Body = StreamReader
"""A body, or the part that has not been read; read it with `readany`."""

Head = RawRequestMessage

HTTP_11 = HttpVersion11
"""The object that the parser uses for HTTP/1.1."""

Parser = HttpRequestParser
ParserError = HttpProcessingError

HEAD_LIMIT = 64 * 1024
"""Largest size of request line and header fields, in bytes. Tokens, cookies and baggage of real clients take some 8 KiB
each."""

STREAM_LIMIT = 256 * 1024
"""Unread bytes of a body; at twice as many, reading from the client pauses."""


class BodyBroken(Exception):
    """Raised by reading a body whose framing is invalid."""


def size_of(head: Head) -> int:
    """Return the bytes of a request line and its header fields."""
    return len(head.path) + sum(len(name) + len(value) + 4 for name, value in head.raw_headers)


def new_parser(connection: ClientConnection | None, loop: asyncio.AbstractEventLoop, **more: Any) -> Parser:
    protocol: Any = connection
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
"""Number of remembered heads, of at most REMEMBERED bytes each."""

_USUAL_VERSION = b" HTTP/1.1\r\n"
"""Stands right after method, one space and target; later if there are more spaces, or bytes before the method."""

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: (\d{1,15})(?=\r\n[^ \t]|\Z)").match
"""Matches a whole line, with the CRLF before it, at a given position. To find the position by the fixed text `_SOUGHT`
costs a third of a search by this expression."""

_SOUGHT = b"ength: "
_SOUGHT_AT = len(b"\r\nContent-L")
"""Position of `_SOUGHT` in the match."""


MOST_POD_HEADS = 64
"""Number of heads for pods that are kept per head of a client."""


class RequestHead:
    """The immutable part that requests with the same head share."""

    def __init__(self, head: Head) -> None:
        self.method = head.method
        self.path, self.query = split_target(head.path)
        self.target = self.path + self.query
        self.headers: Mapping[str, str] = head.headers
        length = self.headers.get("content-length")
        self.length = None if length is None else int(length)
        """The declared length of the body; the parser has checked that it is a number."""
        self.raw_headers = head.raw_headers
        """All fields; without content-length where `Heads.read` has cut it out."""
        self.speaks_11 = (version := head.version) is HTTP_11 or version > HTTP_10
        """Whether the client understands chunks and informational responses."""
        self.id = self.headers.get("x-request-id") or ""
        self.closing: bool = head.should_close
        """Whether the connection closes after the response."""
        self.chunked = head.chunked
        self.wants_websocket = head.upgrade and self.headers.get("upgrade", "").lower() == "websocket"
        self._pod_heads: dict[tuple[bytes, bytes, bool], bytes] = {}

    def head_for_pod(self, base: bytes, host: bytes, has_pod_key: bool) -> bytes:
        """Return the head for the pod with this base path and host, without the fields that differ per request."""
        found = self._pod_heads.get((base, host, has_pod_key))
        if found is None:
            if len(self._pod_heads) >= MOST_POD_HEADS:
                self._pod_heads.clear()
            found = first_lines(self.method, self.target, base, host) + passing(self.raw_headers, has_pod_key)
            self._pod_heads[base, host, has_pod_key] = found
        return found


class Heads:
    """Reads common heads: HTTP/1.1 with a body of declared length. Requests of one client differ in the length of their
    bodies and hardly in anything else of the head. So the length is cut out and the rest looked up, a third of the
    work of parsing (docs/notes/cpu.md)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser: Parser | None = None
        self._read_cached = lru_cache(HEADS)(self._read)

    def read(self, head: bytes) -> tuple[RequestHead, int | None] | None:
        """Return the head and the declared length of the body. Return None for an uncommon or invalid head. `head` is
        without the empty line at its end."""
        at = head.rfind(_SOUGHT) - _SOUGHT_AT
        length = _LENGTH(head, at) if at > 0 and len(head) <= REMEMBERED else None
        if length is None:
            found = (self._read_cached if len(head) <= REMEMBERED else self._read)(head)
            return None if found is None else (found, found.length)
        found = self._read_cached(head[:at] + head[length.end() :])
        if found is None or found.length is not None:
            return None
        return found, int(length[1])

    def _read(self, head: bytes) -> RequestHead | None:
        head += HEAD_END
        # Letting aiohttp parse the body too takes a stream and its Python calls: 250 bytecodes for what usually is one
        # slice of bytes. The option is meant for responses to HEAD; here the next message follows the head.
        parser = self._parser or new_parser(None, self._loop, response_with_body=False)
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


class HttpRequest:
    """Implements `http.service.IncomingRequest`, which describes most attributes."""

    refusal = ""
    model = ""

    def __init__(
        self,
        head: RequestHead,
        length: int | None,
        connection: ClientConnection,
        ids: Iterator[str],
        received_at: float,
    ) -> None:
        """`length` is the declared length of the body. `ids` are for requests without an id. `received_at` is when the
        head was complete, in monotonic seconds."""
        self.head = head
        self.content_length = length
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        """`content-length` may have been removed."""
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
        """The stream of a body that is not collected before the request is served."""
        self.retained = 0
        self.upload: Upload | None = None
        """The rest of a streamed body."""
        self.sent_status = self.sent = 0
        self.response_lines = b""
        """Header lines of every response, a pod's or kvlane's own."""
        self.identity: Identity | None = None
        self.continuation: Continuation | None = None
        """The state of a response that another pod may continue."""

    def respond(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a complete response if the client is connected. The connection closes after it if the request was not
        read completely."""
        if self.transport.is_closing():
            return
        if self.payload is not None and not self.payload.is_eof():
            self.closing = True
        self.sent_status = status
        self.sent = len(body)
        head = b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\n%b%b\r\n" % (
            status,
            HTTPStatus(status).phrase.encode(),
            encode_pairs(headers),
            len(body),
            self.response_lines,
            self.connection_header(),
        )
        self.transport.write(head if self.method == "HEAD" else head + body)

    @property
    def has_left(self) -> bool:
        return self.transport.is_closing()

    def abort(self) -> None:
        self.closing = True
        reset(self.transport)

    def end(self) -> None:
        self.connection.request_ended(self)

    def connection_header(self) -> bytes:
        if self.closing:
            return b"connection: close\r\n"
        return b"" if self.speaks_11 else b"connection: keep-alive\r\n"
