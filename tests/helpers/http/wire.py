"""A pod's connection and the response that it pushes to a client, in memory: what each writes is kept."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import KvlaneError
from proxy.core.listener import NO_LISTENERS
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest, Naming
from proxy.gateway import Gateway
from proxy.http.response import RelayContext, Response
from proxy.http.server import DataPortConfig
from proxy.http.settings import SecuritySettings
from proxy.http.upstream.connection import PodConnection
from proxy.http.upstream.pool import UpstreamPool
from proxy.reliability.settings import Timeouts
from tests.helpers.http.support import CHAT, Seen, understand


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
    """As much of a client request as a response needs."""

    def __init__(self, wire: Wire, speaks_11: bool) -> None:
        self.transport = wire
        self.connection = self
        self.path = CHAT
        self.method = "POST"
        self.id_line = b"x-request-id: id-1\r\n"
        self.speaks_11 = speaks_11
        self.wants_websocket = False
        self.upload = None
        self.response_lines = b""
        self.closing = not speaks_11
        self.sent_status = 0
        self.writer: object = None
        self.writing_paused = False
        self.continuation: object = None

    def connection_header(self) -> bytes:
        return b"connection: close\r\n" if self.closing else b""


class RelayedResponse:
    """One response in progress. Made within a running loop."""

    def __init__(
        self,
        speaks_11: bool = True,
        *,
        path: str = CHAT,
        usage_added: bool = False,
        others: bool = False,
        alias: str = "m",
    ) -> None:
        """`others`: other pods can serve the request instead; `alias` is the client's name of the model `m`."""
        self.others = others
        self.released: list[PodConnection] = []
        self.first_bytes: list[Attempt] = []
        self.pod, self.client = Wire(), Wire()
        self.connection = PodConnection(self.released.append, lambda lost: None)
        self.connection.connection_made(cast(asyncio.Transport, self.pod))
        self.clock = clock = ManualClock()
        endpoint = Endpoint("p", "http://p")
        request = InferenceRequest("1", path, "m", stream=True, usage_added=usage_added, naming=Naming(alias))
        self.attempt = Attempt(request, Decision(endpoint), endpoint, 0, 0.0)
        self.attempt.listeners = NO_LISTENERS.at_first_byte(lambda _: self._first_byte())
        pool = UpstreamPool(1.0, clock)
        self.given_up = ""
        """The reason to give up the response."""
        self.checks: list[float] = []
        """The time of the last received byte, at each check."""
        config = DataPortConfig(
            cast(Gateway, None), SecuritySettings(), Timeouts(), NO_LISTENERS, self._retries_instead, self._give_up
        )
        self.context = RelayContext(pool, clock, asyncio.get_running_loop(), config)
        caller = cast(Any, Caller(self.client, speaks_11))
        self.response = Response(caller, self.attempt, self.context, self.connection)
        self.connection.send(self.response, b"POST", b"")

    def _retries_instead(self, attempt: Attempt, status: int) -> bool:
        return status >= 500 and self.others

    def _first_byte(self) -> None:
        assert self.attempt.status is not None
        assert self.attempt.first_byte_at is not None
        self.first_bytes.append(self.attempt)

    def _give_up(self, attempt: Attempt, silent_since: float) -> str:
        self.checks.append(silent_since)
        return self.given_up

    def read(self, data: bytes) -> None:
        """Receive bytes from the pod."""
        if not self.pod.closed:
            self.connection.data_received(data)

    def end(self, error: Exception | None = None) -> None:
        """End the connection as the pod does."""
        if not self.pod.closed:
            self.pod.closed = True
            self.connection.connection_lost(error)


class Outcome:
    def __init__(self, relayed: RelayedResponse) -> None:
        self.raw = relayed.client.written
        self.aborted = relayed.client.aborted
        self.attempt = relayed.attempt
        self.open = relayed.attempt.ending is None
        self.error: KvlaneError | None = relayed.response.done.result() if relayed.response.done.done() else None
        self.reused = bool(relayed.released)

    def seen(self) -> Seen:
        return understand(self.raw)


def play(
    pieces: list[bytes],
    ending: str,
    speaks_11: bool = True,
    *,
    usage_added: bool = False,
    others: bool = False,
    alias: str = "m",
) -> Outcome:
    """Relay the pieces. `ending`: open (the pod sends nothing more), closed or reset."""

    async def played() -> Outcome:
        return _play(RelayedResponse(speaks_11, usage_added=usage_added, others=others, alias=alias), pieces, ending)

    return asyncio.run(played())


def _play(relayed: RelayedResponse, pieces: list[bytes], ending: str) -> Outcome:
    for piece in pieces:
        relayed.read(piece)
    if ending != "open":
        relayed.end(None if ending == "closed" else ConnectionResetError())
    return Outcome(relayed)
