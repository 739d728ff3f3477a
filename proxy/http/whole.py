"""Requests that are cut in their head, or framed otherwise than by a length: read by the whole parser."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.core.errors import BadRequest, BodyTimeout, RequestError
from proxy.http.call import HttpCall
from proxy.http.seam import UNREAD, Body, BodyBroke, Head, ParserError, whole_parser

if TYPE_CHECKING:
    from proxy.http.client import ClientConnection
    from proxy.http.clients import Clients


class WholeReader:
    """Reads for one connection from the first such request on. Has all bytes but those that come between the end of a
    body and its answer."""

    __slots__ = ("_begun_at", "_clients", "_connection", "_parser")

    keeps = True
    """The parser stops behind each request."""

    def __init__(self, connection: ClientConnection, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._clients = clients
        self._parser = whole_parser(connection, loop)
        self._begun_at: float | None = None
        """When the first byte came of a head that is not whole yet."""

    def feed(self, data: bytes) -> None:
        connection = self._connection
        try:
            messages, upgraded, tail = self._parser.feed_data(data)
        except ParserError as error:
            self._break(error.message.partition("\n")[0])
            return
        for message, body in messages:  # one at most
            self._begin(message, body)
        connection.take = self.feed
        if upgraded:  # was asked for, and refused
            self._parser.set_upgraded(False)
            self.feed(tail)
        elif connection.call is None:
            if data and self._begun_at is None:
                self._begun_at = self._clients.now()
        elif connection.call.payload is None or connection.call.payload.is_eof():
            connection.take = connection.hold

    def leftover(self) -> bytes:
        return self._parser.feed_data(b"")[2]

    def check(self, now: float) -> bool:
        """A head has so much time from its first byte, however steadily it comes."""
        if self._begun_at is None:
            return False
        if now - self._begun_at > self._clients.settings.head_timeout:
            self._refuse(BodyTimeout("The head of the request did not arrive in time."))
        return True

    def _begin(self, message: Head, body: Body) -> None:
        self._begun_at = None
        call = HttpCall(message, self._connection, self._clients.ids, self._clients.now())
        if body.is_eof():
            call.body = body.read_nowait()
        else:
            call.payload = body
        self._connection.begin(call)

    def _break(self, message: str) -> None:
        """What came is not HTTP; where the next request begins nobody knows."""
        call = self._connection.call
        if call is None or call.payload is None:
            self._refuse(BadRequest(f"The request could not be read: {message}"))
        else:
            self._connection.forget()
            call.payload.set_exception(BodyBroke(message))

    def _refuse(self, error: RequestError) -> None:
        """What is not a request, but is counted and logged as one."""
        since = self._clients.now() if self._begun_at is None else self._begun_at
        self._connection.refuse(HttpCall(UNREAD, self._connection, self._clients.ids, since), error)
