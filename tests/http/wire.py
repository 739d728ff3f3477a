"""A pod's connection and the answer that it pushes to a client, in memory: what each writes is kept."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from proxy.core.clock import ManualClock
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import KvlaneError
from proxy.core.exchange import Exchange
from proxy.core.request import InferenceRequest
from proxy.http.answer import Answer, Rim
from proxy.http.upstream.connection import Connection
from proxy.http.upstream.pool import UpstreamPool
from proxy.reliability.settings import Timeouts
from tests.http.support import CHAT, Seen, understand


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert data, "an empty write"
        assert not self.aborted
        self.written += data

    def writelines(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self.write(piece)

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        return None


class Caller:
    """As much of a call as an answer needs."""

    def __init__(self, wire: Wire, speaks_11: bool) -> None:
        self.transport = wire
        self.connection = self
        self.path = CHAT
        self.method = "POST"
        self.id_line = b"x-request-id: id-1\r\n"
        self.speaks_11 = speaks_11
        self.wants_websocket = False
        self.closing = not speaks_11
        self.answered = 0
        self.sink: object = None
        self.writing_paused = False

    def connection_header(self) -> bytes:
        return b"connection: close\r\n" if self.closing else b""


class Leg:
    """One answer under way. Made within a running loop."""

    def __init__(self, speaks_11: bool = True, path: str = CHAT) -> None:
        self.released: list[Connection] = []
        self.first_bytes: list[Exchange] = []
        self.pod, self.client = Wire(), Wire()
        self.connection = Connection(self.released.append, lambda lost: None)
        self.connection.connection_made(cast(asyncio.Transport, self.pod))
        self.clock = clock = ManualClock()
        endpoint = Endpoint("p", "http://p")
        self.exchange = Exchange(InferenceRequest("1", path, "m", stream=True), Decision(endpoint), endpoint, 0, 0.0)
        pool = UpstreamPool(1.0, clock)
        self.rim = Rim(pool, Timeouts(), clock, asyncio.get_running_loop(), self._first_byte)
        caller = cast(Any, Caller(self.client, speaks_11))
        self.answer = Answer(caller, self.exchange, self.rim, self.connection)
        self.connection.send(self.answer, b"POST", b"")

    def _first_byte(self, exchange: Exchange) -> None:
        assert exchange.status is not None
        assert exchange.first_byte_at is not None
        self.first_bytes.append(exchange)

    def read(self, data: bytes) -> None:
        """From the pod."""
        if not self.pod.closed:
            self.connection.data_received(data)

    def end(self, error: Exception | None = None) -> None:
        """By the pod."""
        if not self.pod.closed:
            self.pod.closed = True
            self.connection.connection_lost(error)


class Outcome:
    def __init__(self, leg: Leg) -> None:
        self.raw = leg.client.written
        self.aborted = leg.client.aborted
        self.exchange = leg.exchange
        self.open = leg.exchange.ending is None
        self.error: KvlaneError | None = leg.answer.done.result() if leg.answer.done.done() else None
        self.reused = bool(leg.released)

    def seen(self) -> Seen:
        return understand(self.raw)


def play(pieces: list[bytes], ending: str, speaks_11: bool = True) -> Outcome:
    """`ending`: open (the pod says no more), closed or reset."""
    return asyncio.run(_play(pieces, ending, speaks_11))


async def _play(pieces: list[bytes], ending: str, speaks_11: bool) -> Outcome:
    leg = Leg(speaks_11)
    for piece in pieces:
        leg.read(piece)
    if ending != "open":
        leg.end(None if ending == "closed" else ConnectionResetError())
    return Outcome(leg)
