"""The same relay written plainly, on aiohttp's own client and server: what ours is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from tests.helpers.http.support import Client, Pod, Seen

HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")


class Oracle:
    """Relays every request to one pod."""

    def __init__(self, pod: Pod, session: aiohttp.ClientSession) -> None:
        self._url = pod.endpoint.url
        self._session = session
        self.port = 0

    async def relay(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        response: web.StreamResponse | None = None
        try:
            async with self._session.post(self._url + request.path, data=body) as relayed:
                kept = [(name, value) for name, value in relayed.headers.items() if name.lower() not in HOP_BY_HOP]
                response = web.StreamResponse(status=relayed.status, reason=relayed.reason, headers=dict(kept))
                response.headers.clear()
                for name, value in kept:
                    response.headers.add(name, value)
                await response.prepare(request)
                async for piece in relayed.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientError:
            if response is None or not response.prepared:
                return web.Response(status=502)
            transport = request.transport
            if transport is not None:
                transport.abort()
            return response

    async def ask(self, request: bytes) -> Seen:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            client = Client(reader, writer)
            client.send(request)
            return await client.until_closed()
        finally:
            writer.transport.abort()


@asynccontextmanager
async def oracle(pod: Pod) -> AsyncIterator[Oracle]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        relay = Oracle(pod, session)
        server = web.Server(relay.relay, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        relay.port = listener.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            listener.close()
            await server.shutdown(0.1)
