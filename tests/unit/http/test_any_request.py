"""Requests cut in any place are the same requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Ending
from proxy.core.errors import RequestError
from proxy.core.listener import NO_LISTENERS
from proxy.core.ports import ManualClock
from proxy.gateway import Gateway
from proxy.http.client_connection import ClientConnection
from proxy.http.request import BodyBroken, HttpRequest
from proxy.http.server import DataPortConfig, DataServer
from proxy.http.settings import ListenSettings, SecuritySettings
from proxy.http.upstream.pool import UpstreamPool
from proxy.reliability.settings import Timeouts
from tests.helpers.examples import examples
from tests.helpers.http.messages import reads


class Socket(asyncio.Transport):
    """Takes what is written; a test pushes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.reading = True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self

    def setsockopt(self, *_: int) -> None:
        pass

    def fileno(self) -> int:
        return 3

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


def receive(connection: ClientConnection, data: bytes) -> None:
    """Do as the event loop does: fill the connection's buffer, as often as it takes."""
    while data:
        buffer = connection.get_buffer(-1)
        part, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part
        connection.buffer_updated(len(part))


@dataclass
class Seen:
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    refusals: int = 0


async def served(pieces: Iterable[bytes], patience: int, collected: int) -> Seen:
    """What is served of these reads. A request takes `patience` turns of the loop; bodies of up to `collected` bytes
    are collected."""
    seen = Seen()

    async def serve(client_request: HttpRequest) -> None:
        body = client_request.body
        try:
            while client_request.payload is not None and (piece := await client_request.payload.readany()):
                body += piece
        except BodyBroken:
            seen.refusals += 1
            client_request.closing = True
            connection.request_ended(client_request)
            return
        for _ in range(patience):
            await asyncio.sleep(0)
        seen.requests.append((client_request.method, client_request.path + client_request.query, body))
        client_request.sent_status = 200
        connection.request_ended(client_request)

    def unserved(client_request: HttpRequest, why: RequestError | Ending) -> None:
        seen.refusals += 1

    clock = ManualClock()
    graph = DataPortConfig(cast(Gateway, None), SecuritySettings(), Timeouts(), NO_LISTENERS, lambda *_: False)
    server = DataServer(ListenSettings(), graph, clock, UpstreamPool(1.0, clock))
    server.serve = serve
    server.prepare_collecting = lambda client_request, size: size <= collected  # type: ignore[method-assign]
    server.unserved = unserved  # type: ignore[method-assign]
    connection, sock = server.connect(), Socket()
    connection.connection_made(sock)
    for piece in pieces:
        while not sock.reading and not sock.closed:
            await asyncio.sleep(0)
        if not sock.closed:
            receive(connection, piece)
        for _ in range(len(piece) % 3):
            await asyncio.sleep(0)
    while connection.task is not None:
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return seen


@st.composite
def request(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, bytes]]:
    path = draw(st.sampled_from(("/a", "/b?c=d")))
    fields = "host: a\r\n" + draw(st.sampled_from(("", "x: y\r\n", "connection: upgrade\r\nupgrade: websocket\r\n")))
    kind = draw(st.sampled_from(("none", "length", "chunked")))
    if kind == "none":
        return f"GET {path} HTTP/1.1\r\n{fields}\r\n".encode(), ("GET", path, b"")
    bodies = draw(st.lists(st.sampled_from((b"{}", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"y" * 70_000)), max_size=3))
    body = b"".join(bodies)
    if kind == "length":
        framed = body
        fields += f"content-length: {len(body)}\r\n"
    else:
        framed = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in bodies) + b"0\r\n\r\n"
        fields += "transfer-encoding: chunked\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + framed, ("POST", path, body)


Meaning = tuple[str, str, bytes]


@st.composite
def cut_requests(draw: st.DrawFn) -> tuple[list[Meaning], bool, list[bytes]]:
    """Requests, whether invalid bytes follow them, and all of it in pieces."""
    sent = draw(st.lists(request(), min_size=1, max_size=5))
    nonsense = draw(st.booleans())
    raw = b"".join(each for each, _ in sent) + (b"NONSENSE\r\n\r\n" if nonsense else b"")
    return [meaning for _, meaning in sent], nonsense, draw(reads(raw))


@settings(max_examples=examples(400), deadline=None)
@given(cut_requests(), st.integers(0, 3), st.sampled_from((0, 10_000, 1_000_000)))
def test_requests_are_the_same_with_any_splits(
    cut: tuple[list[Meaning], bool, list[bytes]], patience: int, collected: int
) -> None:
    sent, nonsense, pieces = cut
    seen = asyncio.run(served(pieces, patience, collected))
    assert seen.requests == sent
    assert seen.refusals == nonsense
