"""Two sockets joined after an upgrade: bytes go both ways as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.http.client import ClientConnection


class Tunnel(asyncio.Protocol):
    """The protocol of the pod's socket; the client's connection hands it what the client sends."""

    def __init__(self, client: ClientConnection, pod: asyncio.Transport, ended: Callable[[bool], None]) -> None:
        """`ended` is told once, and whether the pod's side broke."""
        self._client = client.socket
        self._pod = pod
        self._ended = ended
        if client.writing_paused:
            self.pause()

    # the pod's side

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(error is not None)
        self._client.close()

    def pause_writing(self) -> None:
        if not self._client.is_closing():
            self._client.pause_reading()

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
