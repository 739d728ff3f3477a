"""The whole proxy before the pods of a cluster: simulated ones, each with an address of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from proxy.core.endpoint import EndpointState
from proxy.lab.sim import SimConfig, SimPod
from tests.helpers.kubernetes.server import FakeApiServer, objectives_in, pod, pods_in, pool, pools_in, rewrites_in
from tests.helpers.scenarios.stack import CHAT, running
from tests.helpers.waiting import PATIENCE, until
from tests.wire.models.test_cluster import objective, rewrite, rule

QUICK = SimConfig(time_scale=20)
SERVED_BY = "x-kvlane-endpoint"


class Cluster:
    """Its API server, pods that listen on 127.0.0.x, and a proxy with the server's address."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.api = FakeApiServer()
        self.http = aiohttp.ClientSession()
        self.port = 0

    async def run(self, address: str, name: str, config: SimConfig = QUICK, **keys: Any) -> SimPod:
        """A pod that listens, and then is ready."""
        sim = SimPod(config)
        await sim.start(address, self.port)
        self.port = sim.port
        self._stack.push_async_callback(sim.stop)
        self.api.put(pods_in(), pod(name, address, **keys))
        return sim

    async def serve(self, kubernetes: Mapping[str, Any] | None = None, **sections: Any) -> None:
        where = {"server": self.api.url, "namespace": "ns"}
        wanted = kubernetes or {"selector": "app=vllm", "ports": [self.port]}
        pods = {"static": [], "kubernetes": {**where, **wanted}, "refresh": {"interval": "20ms", "maxCore": 1}}
        proxy = running((), {"pods": pods, "security": {"exposeEndpoint": True}, **sections})
        self.app = await self._stack.enter_async_context(proxy)

    async def ask(self, text: str = "Hello!", **fields: Any) -> tuple[int, str]:
        """Status, and the pod that responded."""
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        async with self.http.post(f"http://127.0.0.1:{self.app.port}{CHAT}", json=body) as response:
            await response.read()
            return response.status, response.headers.get(SERVED_BY, "")

    async def is_ready(self) -> bool:
        async with self.http.get(f"http://127.0.0.1:{self.app.admin_port}/readyz") as response:
            return response.status == 200

    async def configure(self, body: Mapping[str, Any]) -> None:
        async with self.http.post(f"http://127.0.0.1:{self.app.admin_port}/admin/config", json=body) as response:
            assert response.status == 200, await response.text()

    async def knows(self, *names: str) -> None:
        """Waits until these are the pods that are asked."""
        await until(lambda: {one.name for one in self.app.fleet.ready} == {f"ns/{name}" for name in names})


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        found = Cluster(stack)
        stack.push_async_callback(found.http.close)
        await stack.enter_async_context(found.api)
        yield found


async def test_pods_of_a_cluster_serve_and_change_without_a_failed_request() -> None:
    async with cluster() as c:
        await c.run("127.0.0.11", "a")
        await c.run("127.0.0.12", "b")
        await c.serve()
        await c.knows("a", "b")
        statuses: list[int] = []
        over = asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                statuses.append((await c.ask(f"question {len(statuses)}"))[0])

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask())
            await c.run("127.0.0.13", "c")
            await c.knows("a", "b", "c")
            c.api.put(pods_in(), pod("a", "127.0.0.11", deleting=True))
            await c.knows("b", "c")
            await until(lambda: c.app.fleet.get("ns/a") is None)
            c.api.delete(pods_in(), "a")
            c.api.sever()
            await c.api.stop_listening()
            count = len(statuses)
            await until(lambda: len(statuses) > count + 8)
            over.set()
        assert set(statuses) == {200}
        await c.knows("b", "c")


async def test_a_deleted_pod_finishes_its_requests_and_gets_no_new_ones() -> None:
    async with cluster() as c:
        ending = await c.run("127.0.0.11", "a", SimConfig(time_scale=2))
        await c.serve()
        await c.knows("a")
        last = asyncio.get_running_loop().create_task(c.ask("a long one", max_tokens=60))
        await until(lambda: bool(ending.requests.open))
        await c.run("127.0.0.12", "b")
        c.api.put(pods_in(), pod("a", "127.0.0.11", deleting=True))
        await c.knows("b")
        leaving = c.app.fleet.get("ns/a")
        assert leaving is not None
        assert leaving.state is EndpointState.DRAINING
        assert await c.ask() == (200, "ns/b")
        assert await last == (200, "ns/a")
        await until(lambda: c.app.fleet.get("ns/a") is None)


async def test_an_address_reused_by_another_pod_is_another_pod() -> None:
    async with cluster() as c:
        first = await c.run("127.0.0.11", "vllm-0", uid="1")
        await c.serve()
        await c.knows("vllm-0")
        before = c.app.fleet.get("ns/vllm-0")
        await c.ask("a prompt that is remembered " * 200)
        await first.stop()
        await c.run("127.0.0.11", "vllm-0", uid="2")
        await until(lambda: c.app.fleet.get("ns/vllm-0") is not before)
        await c.knows("vllm-0")
        assert c.app.fleet.get("ns/vllm-0") not in (None, before)
        assert await c.ask() == (200, "ns/vllm-0")


async def test_without_an_api_server_the_port_is_open_and_no_pod_ready() -> None:
    async with cluster() as c:
        await c.run("127.0.0.11", "a")
        await c.api.stop_listening()
        await c.serve()
        assert not await c.is_ready()
        assert (await c.ask())[0] == 503
        await c.api.listen()
        await c.knows("a")
        assert await c.is_ready()
        assert await c.ask() == (200, "ns/a")


async def test_ranks_of_one_pod_are_separate_endpoints() -> None:
    async with cluster() as c:
        one = await c.run("127.0.0.11", "a")
        two = SimPod(QUICK)
        await two.start("127.0.0.11")
        try:
            c.api.put(pools_in(), pool("llama", {"app": "vllm"}, one.port, two.port))
            await c.serve({"inferencePool": "llama"})
            await c.knows("a-rank-0", "a-rank-1")
            responses = await asyncio.gather(*(c.ask(f"question {number}") for number in range(8)))
            assert set(responses) == {(200, "ns/a-rank-0"), (200, "ns/a-rank-1")}
        finally:
            await two.stop()


async def test_each_pool_finds_its_own_pods() -> None:
    async with cluster() as c:
        await c.run("127.0.0.11", "a")
        await c.run("127.0.0.12", "b", SimConfig(model="large", time_scale=20), labels={"app": "large"})
        other = {"server": c.api.url, "namespace": "ns", "selector": "app=large", "ports": [c.port]}
        await c.serve(pools={"large": {"pods": {"kubernetes": other}}})
        await c.knows("a", "b")
        assert await c.ask() == (200, "ns/a")
        assert await c.ask(model="large") == (200, "ns/b")
        assert {one.name: one.pool for one in c.app.fleet.endpoints} == {"ns/a": "default", "ns/b": "large"}


async def test_a_new_configuration_may_watch_another_source() -> None:
    async with cluster() as c:
        await c.run("127.0.0.11", "a")
        await c.run("127.0.0.12", "b", labels={"app": "other"})
        await c.serve()
        await c.knows("a")
        kubernetes = {"server": c.api.url, "namespace": "ns", "selector": "app=other", "ports": [c.port]}
        body = {"pods": {"kubernetes": kubernetes, "refresh": {"interval": "20ms", "maxCore": 1}}}
        await c.configure(body)
        await c.knows("b")


async def test_objectives_and_rewrites_of_the_cluster_apply() -> None:
    async with cluster() as c:
        await c.run("127.0.0.11", "a")
        where = {"server": c.api.url, "namespace": "ns"}
        await c.serve(models={"kubernetes": where})
        await c.knows("a")
        assert (await c.ask(model="gpt-4o"))[0] == 404
        c.api.put(rewrites_in(), rewrite("names", rule({"sim": None}, "gpt-4o")))
        c.api.put(objectives_in(), objective("chat", 10))
        async with asyncio.timeout(PATIENCE):
            while (await c.ask(model="gpt-4o"))[0] != 200:
                await asyncio.sleep(0.01)
        c.api.delete(rewrites_in(), "names")
        async with asyncio.timeout(PATIENCE):
            while (await c.ask(model="gpt-4o"))[0] != 404:
                await asyncio.sleep(0.01)


async def test_a_new_configuration_keeps_or_drops_the_state_of_the_cluster() -> None:
    async with cluster() as c:
        await c.run("127.0.0.11", "a")
        c.api.put(rewrites_in(), rewrite("names", rule({"sim": None}, "gpt-4o")))
        where = {"server": c.api.url, "namespace": "ns"}
        pods = {"selector": "app=vllm", "ports": [c.port]}
        await c.serve(pods, models={"kubernetes": where})
        await c.knows("a")
        async with asyncio.timeout(PATIENCE):
            while (await c.ask(model="gpt-4o"))[0] != 200:
                await asyncio.sleep(0.01)
        pods.update(where)
        await c.configure({"pods": {"kubernetes": pods}, "models": {"kubernetes": where, "aliases": {"mini": "sim"}}})
        assert [(await c.ask(model=model))[0] for model in ("gpt-4o", "mini")] == [200, 200]
        await c.configure({"pods": {"kubernetes": pods}})
        assert (await c.ask(model="gpt-4o"))[0] == 404
