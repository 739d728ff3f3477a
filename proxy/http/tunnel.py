"""Two sockets joined after an upgrade: bytes go both ways as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.http.client import ClientConnection
from proxy.http.guards import guarded


class Tunnel(asyncio.Protocol):
    """The protocol of the pod's socket; the client's connection hands it what the client sends."""

    def __init__(
        self,
        client: ClientConnection,
        pod: asyncio.Transport,
        ended: Callable[[bool], None],
        broke: Callable[[Exception], None],
    ) -> None:
        """`ended` is called once, with whether the pod's side broke off; `broke` with an error of the proxy."""
        self._client = client.socket
        self._pod = pod
        self._ended = ended
        self._broke = broke
        if client.writing_paused:
            self.pause()

    def broke(self, error: Exception) -> None:
        self._pod.abort()
        self._broke(error)

    # the pod's side

    @guarded
    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    @guarded
    def connection_lost(self, error: Exception | None) -> None:
        self._ended(error is not None)
        self._client.close()

    @guarded
    def pause_writing(self) -> None:
        if not self._client.is_closing():
            self._client.pause_reading()

    @guarded
    def resume_writing(self) -> None:
        if not self._client.is_closing():
            self._client.resume_reading()

    # the client's side

    def feed_data(self, data: bytes) -> None:
        self._pod.write(data)

    def gone(self) -> None:
        self._pod.abort()

    def check(self, now: float) -> None:
        """May be silent for as long as both sides like."""

    def pause(self) -> None:
        if not self._pod.is_closing():
            self._pod.pause_reading()

    def resume(self) -> None:
        if not self._pod.is_closing():
            self._pod.resume_reading()
