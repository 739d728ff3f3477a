"""Adapter to aiohttp's parser of requests and its stream of a body, by the names that `aiohttp` and `aiohttp.http`
export. aiohttp's server is not used.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from aiohttp import StreamReader
from aiohttp.http import HttpProcessingError, HttpRequestParser, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

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


class Reader(Protocol):
    """What parser and stream ask of a connection."""

    connected: bool

    def pause_reading(self) -> None: ...

    def resume_reading(self, resume_parser: bool = True) -> None: ...


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


def whole_parser(reader: Reader, loop: asyncio.AbstractEventLoop) -> Parser:
    """For requests in any framing and any pieces. It stops behind each one and keeps what follows until it is fed
    again: a read full of small requests would be as many objects at once."""
    return _parser(reader, loop, max_msg_queue_size=1)


def body_stream(reader: Reader, loop: asyncio.AbstractEventLoop) -> Body:
    """For a body of declared length, whose end is found by counting."""
    protocol: Any = reader  # declared as a class of aiohttp's, of which it calls what `Reader` has
    return StreamReader(protocol, STREAM_LIMIT, loop=loop)


def _parser(reader: Reader | None, loop: asyncio.AbstractEventLoop, **more: Any) -> Parser:
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
