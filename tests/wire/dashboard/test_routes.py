from __future__ import annotations

import re
from importlib.resources import files

import aiohttp
import pytest

from proxy.dashboard.dashboard import load
from tests.helpers.dashboard.scene import events, scene

KEY = {"authorization": "Bearer s3cret"}


async def test_the_page_and_its_parts_need_no_key_and_its_events_do() -> None:
    async with scene(pods=1, api_key="s3cret") as made, aiohttp.ClientSession(made.url) as http:
        for path in ("/dashboard", *(f"/dashboard/assets/{name}" for name in load())):
            async with http.get(path) as reply:
                assert reply.status == 200, path
        for path in ("/dashboard/events", "/dashboard/other", "/admin/config/source"):
            async with http.get(path) as reply:
                assert reply.status == 401, path
        async with http.get("/dashboard/events", headers=KEY) as reply:
            assert reply.status == 200
            name, data = await anext(events(reply))
    assert name == "all"
    assert set(data["pods"]) == {"vllm-0"}


async def test_the_root_of_the_port_redirects_to_the_page() -> None:
    async with scene(pods=1, api_key="s3cret") as made, aiohttp.ClientSession(made.url) as http:
        for path in ("/", "/dashboard/"):
            async with http.get(path) as reply:
                assert (reply.status, reply.url.path, reply.content_type) == (200, "/dashboard", "text/html"), path


async def test_the_page_loads_and_connects_to_its_own_port_only() -> None:
    async with scene() as made, aiohttp.ClientSession(made.url) as http, http.get("/dashboard") as reply:
        policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
        assert reply.content_type == "text/html"
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"


async def test_an_unchanged_file_is_not_sent_again() -> None:
    async with scene() as made, aiohttp.ClientSession(made.url) as http:
        async with http.get("/dashboard/assets/app.js") as reply:
            tag = reply.headers["etag"]
        async with http.get("/dashboard/assets/app.js", headers={"if-none-match": tag}) as reply:
            assert reply.status == 304
            assert await reply.read() == b""
        async with http.get("/dashboard/assets/app.js", headers={"if-none-match": '"other"'}) as reply:
            assert reply.status == 200


async def test_only_files_of_the_page_are_served() -> None:
    async with scene() as made, aiohttp.ClientSession(made.url) as http:
        for name in ("feed.py", "..%2Ffeed.py", "%2e%2e/feed.py", ""):
            async with http.get(f"/dashboard/assets/{name}") as reply:
                assert reply.status == 404, name


async def test_the_written_configuration_is_shown_without_secrets() -> None:
    async with scene() as made, aiohttp.ClientSession(made.url) as http, http.get("/admin/config/source") as reply:
        text = await reply.text()
    assert "port: 8000" in text
    assert "secret" not in text
    assert "apiKey: '***'" in text


@pytest.mark.parametrize("name", sorted(load()))
def test_the_page_names_only_its_own_address(name: str) -> None:
    text = files("proxy.dashboard").joinpath("page", name).read_text()
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("name", [name for name in sorted(load()) if name.endswith(".js")])
def test_every_imported_module_exists(name: str) -> None:
    text = files("proxy.dashboard").joinpath("page", name).read_text()
    assert set(re.findall(r'from "\./([\w.]+)"', text)) <= set(load())


@pytest.mark.parametrize("name", [name for name in sorted(load()) if name.endswith(".js")])
def test_text_of_clients_and_pods_is_never_markup(name: str) -> None:
    text = files("proxy.dashboard").joinpath("page", name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
