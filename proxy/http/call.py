"""One request of a client, and how it is answered without a pod."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import StreamReader
from aiohttp.http_parser import RawRequestMessage

from proxy.http.body import Upload
from proxy.http.head import Pairs, RawHeaders, local_answer
from proxy.http.paths import split_target
from proxy.http.seam import ClientConnection

HTTP_10 = (1, 0)


class HttpCall:
    """Implements `core.ports.Call`; made by aiohttp's connection in place of its own request."""

    __slots__ = (
        "_message",
        "_task",
        "answered",
        "body",
        "closing",
        "connection",
        "id",
        "id_line",
        "path",
        "payload",
        "query",
        "received_at",
        "retained",
        "sent",
        "transport",
        "upload",
    )

    def __init__(
        self, message: RawRequestMessage, payload: StreamReader, connection: ClientConnection, writer: Any, task: Any
    ) -> None:
        self._message = message
        self._task = task
        self.connection = connection
        self.transport: asyncio.Transport = connection.socket
        self.payload = payload
        self.path, self.query = split_target(message.path)
        self.id = ""
        self.id_line = b""
        self.received_at = 0.0
        self.body = b""
        self.retained = 0
        """Bytes that its body takes of the budget."""
        self.upload: Upload | None = None
        """The rest of a body that is streamed."""
        self.closing: bool = message.should_close
        """Whether this is the connection's last answer."""
        self.answered = 0
        """The status that was sent; 0: nothing was."""
        self.sent = 0
        """Bytes of body in an answer of our own."""

    def name(self, request_id: str) -> None:
        """Gives the request its id."""
        self.id = request_id
        self.id_line = b"x-request-id: %b\r\n" % request_id.encode("utf-8", "surrogateescape")

    @property
    def method(self) -> str:
        return self._message.method

    @property
    def headers(self) -> Mapping[str, str]:
        return self._message.headers

    @property
    def raw_headers(self) -> RawHeaders:
        return self._message.raw_headers

    @property
    def speaks_11(self) -> bool:
        """An older client knows neither chunks nor informational answers."""
        return self._message.version > HTTP_10

    @property
    def wants_websocket(self) -> bool:
        return bool(self._message.upgrade) and self.headers.get("upgrade", "").lower() == "websocket"

    @property
    def content_length(self) -> int | None:
        """As declared; the parser has checked that it is a number."""
        declared = self.headers.get("content-length")
        return None if declared is None else int(declared)

    @property
    def chunked(self) -> bool:
        return bool(self._message.chunked)

    def answer(self, status: int, headers: Pairs, body: bytes, close: bool = False) -> None:
        """Sends a whole answer, if the client is still there."""
        if self.transport.is_closing():
            return
        self.closing = self.closing or close
        self.answered = status
        self.sent = len(body)
        head_only = self.method == "HEAD"
        self.transport.write(
            local_answer(status, headers, body, connection=self.connection_header(), head_only=head_only)
        )

    def connection_header(self) -> bytes:
        if self.closing:
            return b"connection: close\r\n"
        return b"" if self.speaks_11 else b"connection: keep-alive\r\n"

    # what aiohttp asks of a request

    def _finish(self) -> None:
        """Nothing is left to clean up."""

    def _cancel(self, error: BaseException) -> None:
        self.payload.set_exception(error)
