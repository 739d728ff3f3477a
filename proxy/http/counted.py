"""The usual requests: a head that comes in one read, and a body of declared length whose end is found by counting."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from proxy.http.body import JOINED, UNCOUNTED, body_timed_out, is_too_slow, no_memory
from proxy.http.call import HttpCall
from proxy.http.request_head import HEAD_END
from proxy.http.seam import Body, body_stream

if TYPE_CHECKING:
    from proxy.http.client import ClientConnection
    from proxy.http.server import Clients


class CountedReader:
    """Reads for one connection, until a request comes that is not as above.

    A body that comes in several reads is collected before its request is served, if it has its place in the budget at
    once. Else the request is served from its head on, and its body is a stream: that, a task to wait for it and a scope
    for its timeout take 1100 bytecodes for a body that comes in one read behind its head.
    """

    __slots__ = ("_clients", "_connection", "_left", "_loop", "_pieces", "_quiet_since")

    keeps = False

    def __init__(self, connection: ClientConnection, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._clients = clients
        self._loop = loop
        self._left = 0
        """Bytes still to come of a body."""
        self._pieces: list[bytes] = []
        """What is collected of it."""
        self._quiet_since: float | None = None
        """When the sweep first saw that no more of it had come."""

    def feed(self, data: bytes) -> None:
        connection, clients = self._connection, self._clients
        head, end, rest = data.partition(HEAD_END)
        read = clients.heads.read(head) if end else None
        if read is None:
            connection.read_whole(data)
            return
        message, length = read
        call, size = HttpCall(message, length, connection, clients.ids, clients.now()), length or 0
        if len(head) > UNCOUNTED:
            connection.head_size = len(head)
            if not connection.count():
                connection.refuse(call, no_memory())
                return
        if len(rest) == size:
            call.body = rest
            connection.begin(call)
        else:
            self._begin_in_part(call, rest, size)

    def leftover(self) -> bytes:
        return b""

    def check(self, now: float) -> bool:
        """A body that is collected has so much time between two pieces."""
        call = self._connection.call
        if call is None:
            return False
        settings, received = self._clients.settings, (call.content_length or 0) - self._left
        if is_too_slow(received, now - call.received_at, settings.body_timeout, settings.min_body_rate):
            self._connection.refuse(call, body_timed_out())
        elif self._quiet_since is None:
            self._quiet_since = now
        elif now - self._quiet_since > settings.body_timeout:
            self._connection.refuse(call, body_timed_out())
        return True

    def _begin_in_part(self, call: HttpCall, data: bytes, size: int) -> None:
        """With less than its body, or more."""
        connection = self._connection
        if len(data) > size:
            call.body = data[:size]
            connection.begin(call)
            connection.hold(data[size:])
            return
        self._left = size
        if self._clients.collects(call, size):
            connection.call = call
            connection.take = partial(self._collect, call)
        else:
            call.payload = body = body_stream(connection, self._loop)
            connection.begin(call)
            connection.take = partial(self._stream, body)
        if data:
            connection.take(data)

    def _collect(self, call: HttpCall, data: bytes) -> None:
        """Nothing is copied until all is there, unless it comes in very many pieces."""
        pieces = self._pieces
        pieces.append(data)
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
        call.body = body
        self._connection.begin(call)
        if behind:
            self._connection.hold(behind)

    def _stream(self, body: Body, data: bytes) -> None:
        left = self._left
        self._left = left - len(data)
        body.feed_data(data[:left])
        if self._left <= 0:
            self._connection.take = self._connection.hold
            body.feed_eof()
            self._connection.hold(data[left:])
