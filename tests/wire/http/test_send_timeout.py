"""Clients that do not read what is sent to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from proxy.core.attempt import Ending
from proxy.core.params import Duration
from proxy.http.admin import AdminServer
from proxy.http.client_connection import ClientConnection
from proxy.http.guards import CloseReason
from proxy.http.settings import AdminSettings, ServerTls
from tests.helpers.http.authority import Authority, client_context
from tests.helpers.http.support import (
    BUFFER,
    SSE_HEAD,
    STREAMED,
    Client,
    Pod,
    Received,
    Rig,
    answering,
    connection_of,
    event,
    plain,
    post,
    rig,
    small,
)
from tests.helpers.waiting import PATIENCE, until
from tests.wire.http.test_tunnel import SWITCHED, UPGRADE

LARGE = 32 * 2**20
"""Bytes; more than the kernel holds for a client with a small receive buffer."""

SHORT = Duration(0.3)


def stop_reading(client: Client) -> None:
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]


@asynccontextmanager
async def unread(port: Rig) -> AsyncIterator[Client]:
    async with port.client(BUFFER) as client:
        stop_reading(client)
        yield client


class Endless:
    """Sends until the other side leaves."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self.head, self.piece = head, piece
        self.left = asyncio.Event()

    async def __call__(self, request: Received) -> None:
        try:
            await request.send(self.head)
            while True:
                await request.send(self.piece)
        except ConnectionError:
            self.left.set()
            raise


@pytest.mark.parametrize(
    ("raw", "head", "piece"),
    [
        (post(body=STREAMED), SSE_HEAD, event("x" * 8000)),
        (post(), b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n", b"x" * 8000),
        (post(), b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"x" * 8000),
        (UPGRADE, SWITCHED, b"x" * 8000),
    ],
    ids=["stream", "sized", "until close", "tunnel"],
)
async def test_a_client_that_stops_reading_loses_its_request(raw: bytes, head: bytes, piece: bytes) -> None:
    script = Endless(head, piece)
    async with Pod(script) as pod, rig(pod, send_timeout=SHORT) as port, unread(port) as client:
        client.send(raw)
        ended = await port.until_ended()
        assert ended.outcome is Ending.CLIENT_GONE
        assert port.hung_up == {CloseReason.SEND_TIMEOUT: 1}
        await asyncio.wait_for(script.left.wait(), PATIENCE)
        await until(lambda: not port.server.connections)


async def test_a_client_that_stops_reading_and_closes_its_sending_side_has_left() -> None:
    endless = Endless(SSE_HEAD, event("x" * 8000))
    async with Pod(endless) as pod, rig(pod) as port, unread(port) as client:
        await until(lambda: port.server.connections)
        connection = connection_of(port)
        sock = connection.socket.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)  # else the kernel takes more and more
        client.send(post(body=STREAMED))
        await until(lambda: connection.writing_paused)
        client.writer.write_eof()
        await asyncio.wait_for(endless.left.wait(), 30)  # less than `listen.sendTimeout`
        assert (await port.until_ended()).outcome is Ending.CLIENT_GONE


async def test_a_client_over_tls_that_stops_reading_loses_its_request(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "one")
    script = Endless(SSE_HEAD, event("x" * 8000))
    tls = ServerTls(str(authority.issue("kvlane")))
    async with Pod(script) as pod, rig(pod, send_timeout=SHORT, tls=tls) as port:
        sock = small()
        sock.connect(("127.0.0.1", port.server.port))
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=client_context(authority.file), server_hostname="127.0.0.1"
        )
        stop_reading(Client(reader, writer))
        writer.write(post(body=STREAMED))
        assert (await port.until_ended()).outcome is Ending.CLIENT_GONE
        await asyncio.wait_for(script.left.wait(), PATIENCE)
        writer.transport.abort()


async def test_a_client_that_reads_slowly_stays() -> None:
    """It takes three times `sendTimeout` for what it takes before it reads on."""
    async with Pod(answering(plain(b"x" * LARGE))) as pod, rig(pod, send_timeout=SHORT) as port:
        with small(BUFFER) as sock:
            sock.connect(("127.0.0.1", port.server.port))
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, post(close=False))
            await until(lambda: bool(port.gateway.attempts) and connection_of(port).writing_paused)
            read = 0
            for _ in range(12):
                await asyncio.sleep(SHORT / 4)
                read += len(await loop.sock_recv(sock, BUFFER))
            assert read < LARGE / 4
            while read < LARGE:
                piece = await loop.sock_recv(sock, 2**20)
                assert piece
                read += len(piece)
            assert (await port.until_ended()).outcome is Ending.COMPLETE
    assert port.hung_up == {}


async def test_clients_that_pipeline_and_never_read_are_closed() -> None:
    path = b"/" + b"a" * 4000
    raw = b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path * 3000
    async with rig(max_connections=2, send_timeout=SHORT) as port, unread(port) as one, unread(port) as other:
        for client in (one, other):
            client.send(raw)
        await until(lambda: len(port.server.connections) == 2)
        await until(lambda: port.hung_up[CloseReason.SEND_TIMEOUT] == 2)
        await until(lambda: not port.server.connections)
        assert (await port.ask(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")).status == 200


async def unsent(port: Rig, client: Client) -> ClientConnection:
    """Return the connection of the client; the kernel buffers almost nothing, and the client does not read."""
    stop_reading(client)
    await until(lambda: bool(port.server.connections))
    (connection,) = port.server.connections
    connection.socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return connection


@pytest.mark.parametrize("close", [False, True])
async def test_a_small_unread_response_ends_its_connection(close: bool) -> None:
    """Less than pauses writing, after the end of its request."""
    async with (
        Pod(answering(plain(b"x" * 60_000))) as pod,
        rig(pod, send_timeout=SHORT) as port,
        port.client(4096) as one,
    ):
        connection = await unsent(port, one)
        one.send(post(close=close))
        assert (await port.until_ended()).outcome is Ending.COMPLETE
        assert 0 < connection.socket.get_write_buffer_size() < 60_000
        assert not connection.writing_paused
        await until(lambda: not port.server.connections)
        assert port.hung_up == {CloseReason.SEND_TIMEOUT: 1}


async def test_a_client_that_reads_nothing_between_requests_has_keep_alive_time() -> None:
    async with (
        Pod(answering(plain(b"x" * 60_000))) as pod,
        rig(pod, keep_alive=SHORT) as port,
        port.client(4096) as one,
    ):
        await unsent(port, one)
        one.send(post(close=False))
        assert (await port.until_ended()).outcome is Ending.COMPLETE
        ended = asyncio.get_running_loop().time()
        await until(lambda: not port.server.connections)
        assert asyncio.get_running_loop().time() - ended < 10 * SHORT


async def test_a_reader_of_the_admin_port_that_stops_reading_is_disconnected() -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * LARGE)

    async def feed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 100_000)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/feed", feed)
    async with AdminServer(AdminSettings(port=0), app, SHORT) as server:
        for requests in (b"GET /metrics", b"GET /feed"):
            with small(BUFFER) as sock:
                sock.connect(("127.0.0.1", server.port))
                sock.sendall(requests + b" HTTP/1.1\r\nhost: a\r\n\r\n")
                handlers = server._runner.server
                assert handlers is not None
                await until(lambda: bool(handlers.connections))  # noqa: B023
                await until(lambda: not handlers.connections)  # noqa: B023
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{server.port}/metrics") as result:
            assert len(await result.read()) == LARGE
