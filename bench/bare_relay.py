"""The simplest relay one can write with aiohttp and uvloop, as a baseline; arguments are its port and the pods'."""

from __future__ import annotations

import itertools
import sys

import uvloop
from aiohttp import ClientSession, TCPConnector, web

HOP_BY_HOP = {"connection", "content-length", "keep-alive", "transfer-encoding"}


def main() -> None:
    port, *pods = map(int, sys.argv[1:])
    loop = uvloop.new_event_loop()
    web.run_app(application(pods), host="127.0.0.1", port=port, access_log=None, print=None, loop=loop)


def application(pods: list[int]) -> web.Application:
    app = web.Application(client_max_size=64 << 20)
    turns = itertools.cycle(pods)

    async def session(app: web.Application) -> None:
        app["session"] = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        url = f"http://127.0.0.1:{next(turns)}{request.path_qs}"
        async with request.app["session"].request(
            request.method, url, data=body, headers={"Content-Type": request.content_type}
        ) as upstream:
            headers = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
            if upstream.headers.get("Content-Length") is not None:
                return web.Response(status=upstream.status, headers=headers, body=await upstream.read())
            response = web.StreamResponse(status=upstream.status, headers=headers)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app.on_startup.append(session)
    app.router.add_route("*", "/{path:.*}", relay)
    return app


if __name__ == "__main__":
    main()
