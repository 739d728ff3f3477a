"""One request of a client, and how it is answered without a pod."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from proxy.core.identity import Identity
from proxy.http.guards import reset
from proxy.http.head import Pairs, local_answer
from proxy.http.request_head import RequestHead
from proxy.http.seam import Body

if TYPE_CHECKING:
    from proxy.http.body import Upload
    from proxy.http.client import ClientConnection
    from proxy.http.pipeline import Continuation


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
        self.id_line = b"x-request-id: %b\r\n" % self.id.encode("utf-8", "surrogateescape")
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
