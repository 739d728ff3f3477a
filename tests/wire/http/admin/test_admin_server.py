from __future__ import annotations

import asyncio
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from proxy.http.admin import AdminServer
from proxy.http.settings import AdminSettings


def hello() -> web.Application:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", respond)
    return app


async def test_the_port_is_open_while_the_server_runs() -> None:
    async with aiohttp.ClientSession() as session:
        async with AdminServer(AdminSettings(port=0), hello()) as server:
            url = f"http://127.0.0.1:{server.port}/"
            async with session.get(url) as response:
                assert await response.text() == "hello"
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url)


async def test_a_port_in_use_is_an_error_and_leaves_nothing_behind() -> None:
    async with AdminServer(AdminSettings(port=0), hello()) as first:
        with pytest.raises(OSError, match="in use"):
            await AdminServer(AdminSettings(port=first.port), hello()).__aenter__()


async def test_connections_above_the_limit_are_closed_until_others_leave() -> None:
    async with AdminServer(AdminSettings(port=0), hello(), most_connections=2) as server:
        connect = partial(asyncio.open_connection, "127.0.0.1", server.port)
        (reader, writer), (_, idle) = await connect(), await connect()
        for each in (writer, idle):  # a response says that the port has seen the connection
            each.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        third, leaving = await connect()
        assert await third.read() == b""
        leaving.close()
        idle.close()

        async def is_served() -> bool:
            responses, asks = await connect()
            asks.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            try:
                return (await responses.read()).endswith(b"hello")
            except ConnectionError:
                return False
            finally:
                asks.close()

        while not await is_served():
            await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: loc"], ids=["nothing", "a part of a head"])
async def test_a_connection_without_a_whole_request_is_closed(sent: bytes) -> None:
    async with AdminServer(AdminSettings(port=0), hello(), idle_timeout=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("sent", [b"GET /" + b"x" * 20_000, b"no HTTP at all\r\n\r\n", b"\x16\x03\x01\x02\x00"])
async def test_malformed_http_is_refused_and_not_logged(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with AdminServer(AdminSettings(port=0), hello()) as server:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" + sent + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 400 Bad Request" in await reader.read()
            writer.close()
    assert not caplog.records
