"""Every touch of aiohttp's internals, each with its reason.

aiohttp gives the parser of requests with its limits, pipelining, keep-alive and the cancellation of a request whose
client left. What it would do per answer (response object, header map, writer, drain) is not used: an answer is bytes
that are written to the transport. That works because `RequestHandler` asks four things of what it calls a request
(`_finish`, `_cancel`, `_task`, and that it can be made) and three of what it calls a response (`prepare`, `write_eof`,
`keep_alive`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from aiohttp import StreamReader
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo
from aiohttp.web_server import Server

PAYLOAD_ERRORS = (RequestPayloadError, HttpProcessingError)
"""What reading a body raises where its framing is broken."""


def payload_broke(payload: StreamReader) -> None:
    """Nothing more comes: without this aiohttp lingers for the rest of the body, meets the error and logs a trace."""
    payload.feed_eof()


class Sink(Protocol):
    """Who writes to the client's socket: must stop while it is full, and for good when the client is gone."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def gone(self) -> None: ...


class Answered:
    """Stands for an answer that has been written already."""

    __slots__ = ("keep_alive",)

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive

    async def prepare(self, request: object) -> None:
        """Asked for before `write_eof`."""

    async def write_eof(self) -> None:
        """Asked for last."""


KEPT = Answered(keep_alive=True)
CLOSED = Answered(keep_alive=False)

Malformed = Callable[["ClientConnection", int, str], None]


class ClientConnection(RequestHandler):
    """One client's connection."""

    __slots__ = ("_malformed", "sink", "socket")

    def __init__(self, server: ClientServer, malformed: Malformed, **settings: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._malformed = malformed
        self.sink: Sink | None = None
        self.socket: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """aiohttp drops its reference when it closes; a relay may be about to write."""
        self.socket = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """aiohttp queues a parser's error as the next request, and leaves the one whose body it broke waiting."""
        super().data_received(data)
        request = self._current_request
        if request is not None and self._messages and not request.payload.is_eof():  # type: ignore[attr-defined]
            error = self._messages[-1][0]
            if isinstance(error, _ErrInfo):
                request._cancel(RequestPayloadError(error.message))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Asked for by every read of every body; aiohttp parses nothing and resumes what was not paused: 3 us."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The request's task is cancelled one turn of the loop later: until then a pod's answer could still be written
        to a socket that is no more, which uvloop takes for an error."""
        super().connection_lost(exc)
        if self.sink is not None:
            self.sink.gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.sink is not None:
            self.sink.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.sink is not None:
            self.sink.resume()

    def handle_error(
        self, request: object, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> Any:
        """aiohttp calls this for what its parser refuses, and would answer in plain text."""
        self._malformed(self, status, message or "")
        return CLOSED

    def become_tunnel(self, parser: Any) -> None:
        """Bytes that arrive from here on, and those that came behind the upgrade request, go to `parser.feed_data`,
        which returns (False, b""); `parser.feed_eof` is called when the client is gone."""
        self.set_parser(parser)


class ClientServer(Server):
    """Makes connections of our class, and requests of `make_request(message, payload, connection, …)`.

    aiohttp's own request costs 6 us to make, and a URL object more for its path.
    """

    def __init__(
        self,
        handler: Callable[[Any], Awaitable[Any]],
        make_request: Callable[[RawRequestMessage, StreamReader, ClientConnection, Any, Any], Any],
        malformed: Malformed,
        **settings: Any,
    ) -> None:
        """`settings` are aiohttp's, per connection."""
        super().__init__(
            handler,
            request_factory=make_request,  # type: ignore[arg-type]
            handler_cancellation=True,
        )
        self._malformed = malformed
        self._settings = settings

    @property
    def connections(self) -> list[ClientConnection]:  # type: ignore[override]
        return cast(list[ClientConnection], super().connections)

    def close_idle(self) -> None:
        """Closes the connections that are between requests."""
        for connection in self.connections:
            if connection._current_request is None and not connection._messages:
                connection.force_close()

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._malformed, access_log=None, auto_decompress=False, **self._settings)
