"""The whole proxy while objects of its cluster change under it: addresses, selectors, names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.core.endpoint import EndpointState
from proxy.lab.sim import SimConfig, SimPod
from tests.helpers.kubernetes.server import objectives_in, pod, pods_in, pool, pools_in, rewrites_in
from tests.helpers.scenarios.stack import CHAT
from tests.helpers.waiting import PATIENCE, until
from tests.wire.models.test_cluster import objective, rewrite, rule
from tests.wire.scenarios.test_kubernetes import QUICK, Cluster, cluster

LATER = "2026-02-01T00:00:00Z"


@asynccontextmanager
async def traffic(c: Cluster, **fields: Any) -> AsyncIterator[set[tuple[int, str]]]:
    """Four clients that send constantly; (status, pod), all with 200 at the end."""
    responses: set[tuple[int, str]] = set()
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            responses.add(await c.ask(**fields))

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(ask())
        try:
            yield responses
        finally:
            over.set()
    assert {status for status, _ in responses} == {200}


async def imagined(c: Cluster, model: str, **headers: str) -> tuple[int, str]:
    """The priority and the model that a request would have."""
    request = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    body = {"request": request, "path": CHAT, "headers": headers}
    async with c.http.post(f"http://127.0.0.1:{c.app.admin_port}/debug/explain", json=body) as response:
        payload = await response.json()
        assert response.status == 200, payload
        return payload["priority"], payload["model"]


async def comes_true(c: Cluster, expected: tuple[int, str], model: str = "sim", **headers: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while await imagined(c, model, **headers) != expected:
            await asyncio.sleep(0.01)


async def test_the_late_removal_of_a_pod_does_not_affect_its_successor() -> None:
    async with cluster() as c:
        old = await c.run("127.0.0.31", "old", uid="1")
        await c.serve()
        await c.knows("old")
        assert await c.ask() == (200, "ns/old")
        await old.stop()
        new = await c.run("127.0.0.31", "new", SimConfig(time_scale=2), uid="2", born=LATER)
        await c.knows("new")
        long = asyncio.get_running_loop().create_task(c.ask("a long one", max_tokens=40))
        await until(lambda: bool(new.requests.open))
        c.api.put(pods_in(), pod("old", "127.0.0.31", uid="1", deleting=True))
        c.api.delete(pods_in(), "old")
        c.api.put(pods_in(), pod("mark", "127.0.0.32", ready=False))
        await until(lambda: c.app.fleet.get("ns/old") is None)
        assert await long == (200, "ns/new")
        assert await c.ask() == (200, "ns/new")
        found = c.app.fleet.get("ns/new")
        assert found is not None
        assert found.state is EndpointState.READY


async def test_a_pool_that_selects_others_moves_its_requests_without_losing_one() -> None:
    async with cluster() as c:
        await c.run("127.0.0.33", "blue", labels={"colour": "blue"})
        await c.run("127.0.0.34", "green", labels={"colour": "green"})
        c.api.put(pools_in(), pool("llama", {"colour": "blue"}, c.port))
        await c.serve({"inferencePool": "llama"})
        await c.knows("blue")
        async with traffic(c) as responses:
            await until(lambda: (200, "ns/blue") in responses)
            c.api.put(pools_in(), pool("llama", {"colour": "green"}, c.port))
            await c.knows("green")
            await until(lambda: c.app.fleet.get("ns/blue") is None and (200, "ns/green") in responses)
            c.api.put(pools_in(), pool("llama", {"app": "vllm"}, c.port))
            await c.knows("blue", "green")
        assert responses == {(200, "ns/blue"), (200, "ns/green")}


async def test_ranks_that_end_and_return_lose_no_request() -> None:
    async with cluster() as c:
        one = await c.run("127.0.0.35", "a")
        two = SimPod(QUICK)
        await two.start("127.0.0.35")
        try:
            c.api.put(pools_in(), pool("llama", {"app": "vllm"}, one.port, two.port))
            await c.serve({"inferencePool": "llama"})
            await c.knows("a-rank-0", "a-rank-1")
            kept = c.app.fleet.get("ns/a-rank-0")
            async with traffic(c):
                active = {"inference.networking.k8s.io/active-ports": str(one.port)}
                c.api.put(pods_in(), pod("a", "127.0.0.35", annotations=active))
                await c.knows("a-rank-0")
                await until(lambda: c.app.fleet.get("ns/a-rank-1") is None)
                c.api.put(pods_in(), pod("a", "127.0.0.35"))
                await c.knows("a-rank-0", "a-rank-1")
            assert c.app.fleet.get("ns/a-rank-0") is kept
        finally:
            await two.stop()


async def test_pods_of_one_name_in_two_namespaces_are_two_pods() -> None:
    async with cluster() as c:
        await c.run("127.0.0.36", "a")
        far = SimPod(SimConfig(model="large", time_scale=20))
        await far.start("127.0.0.37", c.port)
        try:
            c.api.put(pods_in("other"), pod("a", "127.0.0.37"))
            kubernetes = {"server": c.api.url, "namespace": "other", "selector": "app=vllm", "ports": [c.port]}
            await c.serve(pools={"large": {"pods": {"kubernetes": kubernetes}}})
            await until(lambda: {one.name for one in c.app.fleet.ready} == {"ns/a", "other/a"})
            assert await c.ask() == (200, "ns/a")
            assert await c.ask(model="large") == (200, "other/a")
            c.api.delete(pods_in("other"), "a")
            await until(lambda: c.app.fleet.get("other/a") is None)
            assert await c.ask() == (200, "ns/a")
            assert (await c.ask(model="large"))[0] == 503
        finally:
            await far.stop()


async def test_changed_objectives_apply_to_new_requests() -> None:
    async with cluster() as c:
        await c.run("127.0.0.38", "a")
        where = {"server": c.api.url, "namespace": "ns"}
        await c.serve(models={"kubernetes": where})
        await c.knows("a")
        named = {"x-gateway-inference-objective": "chat"}
        async with traffic(c):
            await comes_true(c, (0, "sim"), **named)
            c.api.put(objectives_in(), objective("chat", 10))
            c.api.put(objectives_in("other"), objective("chat", 99))
            await comes_true(c, (10, "sim"), **named)
            c.api.put(objectives_in(), objective("chat", -5))
            await comes_true(c, (-5, "sim"), **named)
            assert await imagined(c, "sim") == (0, "sim")
            c.api.delete(objectives_in("other"), "chat")
            c.api.delete(objectives_in(), "chat")
            await comes_true(c, (0, "sim"), **named)


async def test_changed_rewrites_apply_to_new_requests() -> None:
    async with cluster() as c:
        await c.run("127.0.0.39", "a")
        await c.run("127.0.0.40", "b", SimConfig(model="large", time_scale=20))
        where = {"server": c.api.url, "namespace": "ns"}
        await c.serve(models={"kubernetes": where})
        await c.knows("a", "b")
        async with traffic(c):
            assert (await c.ask(model="gpt"))[0] == 404
            c.api.put(rewrites_in(), rewrite("names", rule({"sim": None}, "gpt")))
            await comes_true(c, (0, "sim"), "gpt")
            assert await c.ask(model="gpt") == (200, "ns/a")
            c.api.put(rewrites_in(), rewrite("names", rule({"large": None}, "gpt")))
            await comes_true(c, (0, "large"), "gpt")
            assert await c.ask(model="gpt") == (200, "ns/b")
            c.api.put(rewrites_in(), rewrite("older", rule({"sim": None}, "gpt"), born="2025-01-01T00:00:00Z"))
            await comes_true(c, (0, "sim"), "gpt")
            c.api.delete(rewrites_in(), "older")
            await comes_true(c, (0, "large"), "gpt")
            c.api.delete(rewrites_in(), "names")
            async with asyncio.timeout(PATIENCE):
                while (await c.ask(model="gpt"))[0] != 404:
                    await asyncio.sleep(0.01)
