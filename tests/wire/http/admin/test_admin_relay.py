from __future__ import annotations

import asyncio
import gzip

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from proxy.http import admin_pods
from tests.helpers.http.admin.fakes import admin_port, engine
from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE


async def echo(request: web.Request) -> web.Response:
    headers = {name.lower(): value for name, value in request.headers.items()}
    seen = {"method": request.method, "path": request.raw_path, "headers": headers, "body": await request.text()}
    return web.json_response(seen, status=207, headers={"x-engine": "yes"})


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH"])
async def test_any_method_reaches_the_control_path_of_its_pod(method: str) -> None:
    async with admin_port() as port, engine(echo) as url:
        port.add("pod-a", url)
        path = "/admin/pods/pod-a/proxy/v1/load_lora_adapter?x=1&y=a+b"
        async with port.client.request(method, path, data=b'{"lora_name": "a"}') as response:
            assert response.status == 207
            assert response.headers["x-engine"] == "yes"
            seen = await response.json()
    assert (seen["method"], seen["body"]) == (method, '{"lora_name": "a"}')
    assert seen["path"] == "/v1/load_lora_adapter?x=1&y=a+b"


async def test_escaped_characters_stay_escaped() -> None:
    async with admin_port() as port, engine(echo) as url:
        port.add("pod-a", url)
        path = "admin/pods/pod-a/proxy/a%2Fb%20c?d=%2F"
        async with port.client.session.get(URL(str(port.client.make_url("/")) + path, encoded=True)) as response:
            assert (await response.json())["path"] == "/a%2Fb%20c?d=%2F"


async def test_the_key_of_the_admin_port_is_not_for_the_pod() -> None:
    async with admin_port("sesame") as port, engine(echo) as url:
        port.add("open", url)
        port.add("closed", url, api_key="pod-key")
        headers = {"authorization": "Bearer sesame"}
        for name, expected in (("open", None), ("closed", "Bearer pod-key")):
            seen = await port.client.get(f"/admin/pods/{name}/proxy/sleep", headers=headers)
            assert (await seen.json())["headers"].get("authorization") == expected


async def test_a_redirect_is_returned_and_not_followed() -> None:
    async def away(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"location": "http://169.254.169.254/"})

    async with admin_port() as port, engine(away) as url:
        port.add("pod-a", url)
        async with port.client.get("/admin/pods/pod-a/proxy/x", allow_redirects=False) as response:
            assert response.status == 302


async def test_an_unrequested_compressed_response_is_readable() -> None:
    async def compressed(request: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(b"hello"), headers={"content-encoding": "gzip"})

    async with admin_port() as port, engine(compressed) as url:
        port.add("pod-a", url)
        async with port.client.get("/admin/pods/pod-a/proxy/x") as response:
            assert await response.read() == b"hello"


async def test_an_unreachable_pod_is_a_bad_gateway_without_its_url() -> None:
    closed = free_port()
    async with admin_port() as port:
        port.add("pod-a", f"http://127.0.0.1:{closed}")
        error = await port.error("POST", "/admin/pods/pod-a/proxy/sleep", 502)
    assert "'pod-a'" in error["message"]
    assert str(closed) not in error["message"]


async def test_a_pod_that_never_responds_is_a_gateway_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_pods, "TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    released = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with admin_port() as port, engine(silent) as url:
        port.add("pod-a", url)
        error = await port.error("GET", "/admin/pods/pod-a/proxy/x", 504)
        released.set()
    assert error["code"] == "upstream_timed_out"


async def test_a_broken_response_does_not_seem_complete(caplog: pytest.LogCaptureFixture) -> None:
    async def breaking(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"half")
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with admin_port() as port, engine(breaking) as url:
        port.add("pod-a", url)
        with pytest.raises(aiohttp.ClientError):
            async with port.client.get("/admin/pods/pod-a/proxy/x") as result:
                await result.read()
    assert "broke off" in caplog.text


async def test_a_viewer_that_leaves_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    left, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await left.wait()
        try:
            for _ in range(200):
                await response.write(b"half" * 1000)
                await asyncio.sleep(0.001)
        finally:
            ended.set()
        return response

    async with admin_port() as port, engine(slow) as url:
        port.add("pod-a", url)
        async with port.client.get("/admin/pods/pod-a/proxy/x") as result:
            await result.content.readany()
        left.set()
        await asyncio.wait_for(ended.wait(), PATIENCE)
    assert caplog.messages == []


async def test_a_page_of_a_pod_cannot_act_as_the_admin_port() -> None:
    """Its script could change everything here; and its headers could let pages of other sites read the responses."""

    async def page(request: web.Request) -> web.Response:
        headers = {
            "Access-Control-Allow-Origin": "*",
            "access-control-allow-credentials": "true",
            "set-cookie": "a=b",
            "content-security-policy": "script-src *",
            "x-engine": "yes",
        }
        return web.Response(text="<script>alert(1)</script>", content_type="text/html", headers=headers)

    async with admin_port() as port, engine(page) as url:
        port.add("pod-a", url)
        async with port.client.get("/admin/pods/pod-a/proxy/x") as response:
            received = response.headers
            assert received.getall("content-security-policy") == ["default-src 'none'; sandbox"]
            assert received["x-content-type-options"] == "nosniff"
            assert received["x-engine"] == "yes"
            assert not [name for name in received if name.lower().startswith("access-control-")]
            assert "set-cookie" not in received
