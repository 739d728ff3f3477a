from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, SimFleet, serve
from tests.helpers.lab.sim.support import post
from tests.helpers.ports import free_port


async def test_a_fleet_has_a_url_for_each_pod() -> None:
    async with SimFleet(3) as fleet, aiohttp.ClientSession() as client:
        assert len(set(fleet.urls)) == 3
        for url in fleet.urls:
            async with client.get(f"{url}/health") as response:
                assert response.status == 200


async def test_every_pod_may_have_its_own_configuration() -> None:
    configs = [SimConfig(model="a"), SimConfig(model="b")]
    async with SimFleet(2, configs) as fleet, aiohttp.ClientSession() as client:
        replies = [await post(client, f"{url}/v1/completions", prompt="x") for url in fleet.urls]
    assert [reply["model"] for reply in replies] == ["a", "b"]


def test_a_fleet_needs_as_many_configurations_as_pods() -> None:
    with pytest.raises(ValueError, match="3 pods need 3 configurations, not 1"):
        SimFleet(3, [SimConfig()])


async def test_a_fleet_that_cannot_start_leaves_no_pod_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fleet = SimFleet(2, port=taken.getsockname()[1] - 1)
        with pytest.raises(OSError, match="in use"):
            async with fleet:
                pass
        assert not any(pod.serving for pod in fleet.pods)


async def test_serving_continues_until_cancelled() -> None:
    port = free_port()
    serving = asyncio.get_running_loop().create_task(serve([SimConfig()], host="127.0.0.1", port=port))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        while True:
            try:
                async with client.get("/health") as response:
                    assert response.status == 200
                    break
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.005)
        serving.cancel()
        await asyncio.wait([serving])
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/health")
