from __future__ import annotations

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, SimPod


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_has_an_empty_body(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_a_pod_has_a_version(client: aiohttp.ClientSession) -> None:
    async with client.get("/version") as response:
        assert await response.json() == {"version": "0.32.0"}


async def test_adapters_are_listed_below_their_model() -> None:
    config = SimConfig(lora_adapters=("tuned",), max_model_len=4096)
    async with SimPod(config) as pod, aiohttp.ClientSession(pod.url) as client, client.get("/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
        ("sim", None, 4096),
        ("tuned", "sim", None),
    ]


async def test_periodic_requests_of_a_proxy_are_not_logged(pod: SimPod, client: aiohttp.ClientSession) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/load", "/admin/state"):
        async with client.get(path) as response:
            assert response.status == 200
    assert len(pod.requests) == 0
