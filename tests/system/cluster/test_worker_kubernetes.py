"""Workers before the pods of a cluster: one process follows them for all, each follows what names models."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from proxy.cluster.supervisor import Supervisor
from proxy.lab.sim import SimConfig, SimPod
from proxy.settings import from_mapping
from tests.helpers.cluster.host import CHAT
from tests.helpers.kubernetes.server import FakeApiServer, objectives_in, pod, pods_in, rewrites_in
from tests.helpers.waiting import PATIENCE, until
from tests.wire.models.test_cluster import rewrite, rule


async def test_workers_have_the_pods_and_rewrites_of_a_cluster() -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(FakeApiServer())
        sim = SimPod(SimConfig(time_scale=20))
        await sim.start("127.0.0.21")
        stack.push_async_callback(sim.stop)
        api.put(pods_in(), pod("a", "127.0.0.21", uid="1"))
        api.put(rewrites_in(), rewrite("names", rule({"sim": None}, "gpt-4o")))
        supervisor = await stack.enter_async_context(Supervisor(configured(api, sim.port), 2))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        data, admin = f"http://127.0.0.1:{supervisor.port}{CHAT}", f"http://127.0.0.1:{supervisor.admin_port}"

        async def status_for(model: str) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
            async with http.post(data, json=body, headers={"connection": "close"}) as response:
                await response.read()
                return response.status

        await until(lambda: len([one for one in api.watches if one["where"] == rewrites_in()]) == 2)
        async with asyncio.timeout(PATIENCE):
            while {await status_for("gpt-4o") for _ in range(6)} != {200}:
                await asyncio.sleep(0.05)
        assert len([one for one in api.lists if one["where"] == pods_in()]) == 1
        assert len([one for one in api.lists if one["where"] == objectives_in()]) == 2

        first = supervisor.fleet.get("ns/a")
        api.put(pods_in(), pod("a", "127.0.0.21", uid="2"))
        await until(lambda: supervisor.fleet.get("ns/a") is not first and bool(supervisor.fleet.ready))
        async with asyncio.timeout(PATIENCE):
            while {await status_for("sim") for _ in range(6)} != {200}:
                await asyncio.sleep(0.05)
        async with http.get(f"{admin}/admin/config") as result:
            assert "of-the-pods" not in await result.text()


def configured(api: FakeApiServer, port: int) -> Any:
    where = {"server": api.url, "namespace": "ns"}
    return from_mapping(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "telemetry": {"accessLog": False},
            "pods": {"kubernetes": {**where, "selector": "app=vllm", "ports": [port], "apiKey": "of-the-pods"}},
            "models": {"kubernetes": where},
        }
    )
