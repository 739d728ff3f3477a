from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from proxy.http.admin_server import AdminServer
from proxy.http.settings import Admin


def hello() -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", answer)
    return app


async def test_the_port_is_open_as_long_as_the_server_runs() -> None:
    async with aiohttp.ClientSession() as session:
        async with AdminServer(Admin(port=0), hello()) as server:
            url = f"http://127.0.0.1:{server.port}/"
            async with session.get(url) as answer:
                assert await answer.text() == "hello"
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url)


async def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_behind() -> None:
    async with AdminServer(Admin(port=0), hello()) as first:
        with pytest.raises(OSError, match="in use"):
            await AdminServer(Admin(port=first.port), hello()).__aenter__()
