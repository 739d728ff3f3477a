"""The whole proxy over TLS on every side."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from proxy.app import App
from proxy.settings import from_mapping
from tests.helpers.http.authority import Authority, client_context, server_context
from tests.helpers.scenarios.stack import CHAT
from tests.helpers.waiting import until

EXPOSITION = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


async def pod(context: ssl.SSLContext, requested: list[str]) -> tuple[web.AppRunner, int]:
    async def respond(request: web.Request) -> web.Response:
        requested.append(request.path)
        await request.read()
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})
        return web.json_response({"id": "1"}) if request.method == "POST" else web.Response(text=EXPOSITION)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", respond)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port: int = runner.addresses[0][1]
    return runner, port


async def test_requests_scrapes_checks_and_operators_work_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    requested: list[str] = []
    own, ca = str(authority.issue("kvlane")), str(authority.file)
    runner, port = await pod(server_context(authority.issue("pod"), authority.file), requested)
    settings: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0, "tls": {"cert": own, "clientCa": ca}},
        "admin": {"port": 0, "tls": {"cert": own}},
        "pods": {
            "tls": {"ca": ca, "cert": own},
            "static": [{"url": f"https://127.0.0.1:{port}", "name": "p"}],
            "refresh": {"interval": "50ms"},
        },
        "reliability": {"health": {"interval": "100ms"}},
        "telemetry": {"accessLog": False},
    }
    context = client_context(authority.file, authority.issue("client"))
    try:
        async with App(from_mapping(settings)) as app, aiohttp.ClientSession() as http:
            await until(lambda: {"/metrics", "/v1/models", "/health"} <= set(requested))
            await asyncio.sleep(0.1)
            assert not any(app.fleet.ejection_reasons(endpoint) for endpoint in app.fleet.endpoints)
            data, admin = f"https://127.0.0.1:{app.port}", f"https://127.0.0.1:{app.admin_port}"
            async with http.post(data + CHAT, json={"model": "m", "messages": []}, ssl=context) as response:
                assert response.status == 200
            async with http.get(admin + "/admin/pods/p/proxy/version", ssl=context) as response:
                assert response.status == 200
    finally:
        await runner.cleanup()
