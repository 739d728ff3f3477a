"""The head of a request as it is served, and those that clients send again and again, read once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache

from proxy.http.head import REMEMBERED, passing
from proxy.http.paths import split_target
from proxy.http.seam import HEAD_LIMIT, HTTP_11, Head, Parser, ParserError, head_parser, size_of

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


class RequestHead:
    """All that is the same in requests of the same head; nobody changes it."""

    __slots__ = (
        "_passing",
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
        self._passing: dict[bool, bytes] = {}

    def passing(self, authorized: bool) -> bytes:
        """See `proxy.http.head`."""
        lines = self._passing.get(authorized)
        if lines is None:
            lines = self._passing[authorized] = passing(self.raw_headers, authorized)
        return lines


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
