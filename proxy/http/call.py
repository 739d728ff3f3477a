"""One request of a client, and how it is answered without a pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from proxy.core.identity import Identity
from proxy.http.head import Pairs, local_answer
from proxy.http.paths import split_target
from proxy.http.seam import HTTP_11, Body, Head

if TYPE_CHECKING:
    from proxy.http.body import Upload
    from proxy.http.client import ClientConnection
    from proxy.http.continued import Story

HTTP_10 = (1, 0)


class HttpCall:
    """Implements `core.ports.Call`."""

    def __init__(self, head: Head, connection: ClientConnection, ids: Iterator[str], received_at: float) -> None:
        """`ids` are for requests that bring none. `received_at` is when the head was whole, in monotonic seconds."""
        self.method = head.method
        self.path, self.query = split_target(head.path)
        self.headers: Mapping[str, str] = head.headers
        self.raw_headers = head.raw_headers
        self.speaks_11 = (version := head.version) is HTTP_11 or version > HTTP_10
        """An older client knows neither chunks nor informational answers."""
        self.connection = connection
        self.transport = connection.socket
        self.id = self.headers.get("x-request-id") or next(ids)
        self.id_line = b"x-request-id: %b\r\n" % self.id.encode("utf-8", "surrogateescape")
        self.received_at = received_at
        self.closing: bool = head.should_close
        """Whether this is the connection's last answer."""
        self.chunked = head.chunked
        self.wants_websocket = head.upgrade and self.headers.get("upgrade", "").lower() == "websocket"
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
        self.story: Story | None = None
        """Of an answer that may go on with another pod."""

    @property
    def content_length(self) -> int | None:
        """As declared; the parser has checked that it is a number."""
        declared = self.headers.get("content-length")
        return None if declared is None else int(declared)

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
        self.transport.abort()

    def end(self) -> None:
        """Of one that was served."""
        self.connection.answered(self)

    def connection_header(self) -> bytes:
        if self.closing:
            return b"connection: close\r\n"
        return b"" if self.speaks_11 else b"connection: keep-alive\r\n"
