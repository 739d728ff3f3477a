"""Requests of the control plane."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy import outbound


def serving(response: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", response)
    return app


async def echo(request: web.Request) -> web.Response:
    return web.Response(status=203, body=await request.read(), headers={"x-path": request.path_qs})


async def test_a_response_is_read_completely() -> None:
    async with TestServer(serving(echo)) as server:
        url = str(server.make_url("/a"))
        response = await outbound.fetch("POST", url, 30.0, data=b"body", params={"b": "c"})
    assert (response.status, response.body, response.headers["X-Path"]) == (203, b"body", "/a?b=c")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_response_larger_than_its_limit_is_refused(chunked: bool) -> None:
    async def large(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=b"x" * 100_001)
        if chunked:
            response.enable_chunked_encoding()
        return response

    async with TestServer(serving(large)) as server:
        url = str(server.make_url("/"))
        assert len((await outbound.fetch("GET", url, 30.0, limit=100_001)).body) == 100_001
        with pytest.raises(outbound.FAILURES, match="more than 100000 bytes"):
            await outbound.fetch("GET", url, 30.0, limit=100_000)


async def test_a_unix_socket_serves_any_host(tmp_path: Path) -> None:
    runner = web.AppRunner(serving(echo))
    await runner.setup()
    try:
        path = str(tmp_path / "s")
        await web.UnixSite(runner, path).start()
        response = await outbound.fetch("GET", "http://anything/b", 30.0, socket_path=path)
    finally:
        await runner.cleanup()
    assert (response.status, response.headers["x-path"]) == (203, "/b")


def test_a_connection_to_a_vanished_peer_fails_within_half_a_minute() -> None:
    with outbound.tcp_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (getattr(socket, name) for name in outbound._KEEP_ALIVE)
        idle, between, count = (made.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + between * count <= 30
