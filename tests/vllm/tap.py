"""A tap on the wire between proxy and engine: it passes everything on, and remembers it."""

from __future__ import annotations

import http.client
import io
import socket
import socketserver
import threading
from contextlib import closing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

from tests.vllm.client import EngineResponse, read_response


@dataclass(slots=True)
class Recording:
    """One connection, both directions."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class Tap:
    """`with Tap("host:port") as tap`: who connects to `tap.url` talks to that server."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._recordings: list[Recording] = []
        tap = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                tap._relay(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until both sides of every connection have closed it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._server.server_address[:2])

    @property
    def sent(self) -> list[bytes]:
        """By connection: what came from the client."""
        return [bytes(each.up) for each in self._recordings]

    def response_to(self, method: str) -> EngineResponse:
        """What the server sent on the only connection that began with a request of this method."""
        (recording,) = [each for each in self._recordings if each.up.startswith(method.encode())]
        response = http.client.HTTPResponse(cast(socket.socket, _Played(bytes(recording.down))))
        response.begin()
        return read_response(response, 0.0)

    def _relay(self, client: socket.socket) -> None:
        recording = Recording()
        self._recordings.append(recording)
        with closing(socket.create_connection(self._target)) as server:
            upwards = threading.Thread(target=pass_on, args=(client, server, recording.up))
            upwards.start()
            pass_on(server, client, recording.down)
            upwards.join()


class _Played:
    """As much of a socket as is needed to read from it."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def pass_on(source: socket.socket, target: socket.socket, received: bytearray) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            received += piece
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
