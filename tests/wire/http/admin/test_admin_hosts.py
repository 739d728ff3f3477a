"""Host names that the admin port serves: a page of another site cannot reach it by DNS rebinding."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from proxy.core.errors import ConfigError
from proxy.core.params import load
from proxy.http.settings import AdminSettings, host_name
from tests.helpers.dashboard.scene import scene
from tests.helpers.http.admin.fakes import admin_port

REBOUND = {"host": "evil.example:9190", "origin": "http://evil.example:9190", "sec-fetch-site": "same-origin"}
BEARER = {"authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/config"),
        ("GET", "/admin/pods"),
        ("POST", "/admin/pods"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/nowhere"),
    ],
)
async def test_a_page_of_another_site_whose_name_resolves_to_the_port_is_refused(method: str, path: str) -> None:
    async with admin_port() as port:
        error = await port.error(method, path, 421, headers=REBOUND, allow_redirects=False)
        assert error["code"] == "misdirected_request"
        assert "evil.example:9190" in error["message"]
        assert "admin.hosts" in error["message"]
        assert not port.fleet.endpoints


async def test_the_event_stream_of_the_dashboard_is_refused_too() -> None:
    async with (
        scene() as made,
        aiohttp.ClientSession(made.url) as http,
        http.get("/dashboard/events", headers=REBOUND) as response,
    ):
        assert response.status == 421


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:9190",
        "localhost.:9190",
        "127.0.0.1:9190",
        "10.0.0.7",
        "[::1]:9190",
        "[fd00::7]",
        "kvlane.example",
        "KVLANE.example.:80",
    ],
)
async def test_addresses_localhost_and_configured_names_are_served(host: str) -> None:
    async with admin_port(hosts=["Kvlane.Example:9190"]) as port:
        await port.json("GET", "/admin/pods", headers={"host": host})


@pytest.mark.parametrize("host", ["localhost.evil.example", "127.0.0.1.evil.example", "evil.example", "[evil.example]"])
async def test_names_that_only_start_like_a_served_one_are_refused(host: str) -> None:
    async with admin_port(hosts=["kvlane.example"]) as port:
        await port.error("GET", "/admin/pods", 421, headers={"host": host})


def test_the_name_in_admin_host_is_served() -> None:
    assert AdminSettings(host="Proxy.Internal").host_names == {"proxy.internal"}
    assert host_name("fd00::7") == host_name("[FD00::7]:9190") == "fd00::7"


async def test_a_request_without_a_host_is_refused() -> None:
    async with admin_port() as port:
        reader, writer = await asyncio.open_connection(port.client.host, port.client.port)
        writer.write(b"GET /admin/config HTTP/1.0\r\n\r\n")
        assert b" 421 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_are_served_under_any_name(path: str) -> None:
    async with admin_port() as port, port.client.get(path, headers=REBOUND) as response:
        assert response.status in (200, 503)


async def test_with_a_key_only_metrics_are_restricted_to_served_names() -> None:
    async with admin_port("sesame") as port:
        await port.json("GET", "/admin/pods", headers=BEARER | {"host": "kvlane.example"})
        await port.json("GET", "/admin/pods", 401, headers={"host": "kvlane.example"})
        await port.error("GET", "/metrics", 421, headers={"host": "kvlane.example"})


@pytest.mark.parametrize("name", ["", "*", "http://kvlane", "kvlane/metrics", "two names"])
def test_an_impossible_host_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name"):
        load(AdminSettings, {"hosts": [name]})
