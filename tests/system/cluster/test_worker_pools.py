"""Several pools with several workers: all of them know which pod is where, and share what they know pool by pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from proxy.cluster.supervisor import Supervisor
from proxy.lab.sim import SimConfig, SimFleet
from tests.helpers.cluster.host import CHAT, Host, configured, held, question, state, until_workers_show
from tests.helpers.waiting import until
from tests.system.cluster.test_supervisor import BY_PREFIX

SMALL = SimConfig(model="small", time_scale=20)
LARGE = SimConfig(model="large", time_scale=1)
"""Some seven milliseconds per token."""

WORKERS = 2

DOCUMENT = "The pod holds a prefix. " * 200


def sections(sim: SimFleet, **large: Any) -> dict[str, Any]:
    """The first pod is in the default pool; in `large` are the others, and these sections. None: there is no such."""
    first, *others = ({"url": url, "name": f"pod-{index}"} for index, url in enumerate(sim.urls))
    return {"pods": {"static": [first]}, "pools": {"large": {"pods": {"static": others}, **large}}}


@asynccontextmanager
async def host(**large: Any) -> AsyncIterator[Host]:
    async with (
        SimFleet(3, [SMALL, LARGE, LARGE]) as sim,
        Supervisor(configured(sim, **sections(sim, **large)), WORKERS) as supervisor,
        aiohttp.ClientSession() as admin_http,
    ):
        yield Host(sim, supervisor, admin_http)


async def ask(it: Host, model: str, text: str, tokens: int = 4) -> tuple[int, str]:
    """Status and pod, over a connection of its own."""
    body = {**question(text, tokens), "model": model}
    async with aiohttp.ClientSession() as session, session.post(it.url + CHAT, json=body) as response:
        await response.read()
        return response.status, response.headers.get("x-kvlane-endpoint", "")


async def served(it: Host, model: str, times: int = 12) -> Counter[tuple[int, str]]:
    return Counter(await asyncio.gather(*(ask(it, model, f"question {number}") for number in range(times))))


def remembers(lines: set[str]) -> bool:
    """The blocks of the document."""
    return any(float(one.rpartition(" ")[2]) > 10 for one in lines if one.startswith("kvlane_prefix_index_blocks"))


def serve(lines: set[str], *pods: str) -> bool:
    """These pods are ready, and there is no other."""
    return {one for one in lines if one.startswith("kvlane_endpoint_state{")} == {state(pod, "ready") for pod in pods}


async def test_every_worker_knows_the_pool_of_each_pod_and_the_load_from_others() -> None:
    async with host(scheduling=BY_PREFIX) as it:
        assert set(await served(it, "small")) == {(200, "pod-0")}
        assert set(await served(it, "large")) == {(200, "pod-1"), (200, "pod-2")}
        assert set(await served(it, "none")) == {(404, "")}
        pods = (await it.admin("GET", "/admin/pods"))["pods"]
        assert {pod["name"]: pod["pool"] for pod in pods} == {"pod-0": "default", "pod-1": "large", "pod-2": "large"}
        assert await it.samples("kvlane_pool_ready_endpoints") == {
            'kvlane_pool_ready_endpoints{pool="default"}': 1,
            'kvlane_pool_ready_endpoints{pool="large"}': 2,
        }
        _, first = await ask(it, "large", DOCUMENT)
        await until_workers_show(it.supervisor, remembers)
        assert {pod for _, pod in [await ask(it, "large", DOCUMENT) for _ in range(8)]} == {first}


async def test_caps_of_a_pool_hold_for_all_workers_and_do_not_affect_other_pools() -> None:
    async with host(flowControl={"maxConcurrent": 4}) as it:
        async with held(it.sim.pods[1:]):
            flood = [asyncio.ensure_future(ask(it, "large", f"question {number}", 30)) for number in range(24)]
            await until(lambda: it.in_flight() >= 2)
            assert set(await served(it, "small", 4)) == {(200, "pod-0")}
            most = sum(one.load.requests for one in it.supervisor.fleet.endpoints if one.pool == "large")
        while not all(one.done() for one in flood):
            most = max(most, sum(one.load.requests for one in it.supervisor.fleet.endpoints if one.pool == "large"))
            await asyncio.sleep(0.002)
        assert {one.result()[0] for one in flood} == {200}
        assert 2 <= most <= 8


async def test_all_workers_add_and_remove_a_pool() -> None:
    async with host() as it:
        one = {"url": it.sim.urls[0], "name": "pod-0"}
        alone = configured(it.sim, pods={"static": [one]})
        await it.supervisor.reload(alone)
        await until_workers_show(it.supervisor, lambda lines: serve(lines, "pod-0"))
        assert set(await served(it, "large")) == {(503, "")}
        await it.supervisor.reload(configured(it.sim, **sections(it.sim)))
        await until_workers_show(it.supervisor, lambda lines: serve(lines, "pod-0", "pod-1", "pod-2"))
        assert set(await served(it, "large")) == {(200, "pod-1"), (200, "pod-2")}
        assert set(await served(it, "small")) == {(200, "pod-0")}
        await it.admin("DELETE", "/admin/pods/pod-2")
        await until(lambda: len(it.supervisor.fleet.endpoints) == 2)
        await it.admin("POST", "/admin/pods", {"url": it.sim.urls[2], "name": "pod-9", "pool": "large"})
        await until_workers_show(it.supervisor, lambda lines: serve(lines, "pod-0", "pod-1", "pod-9"))
        assert set(await served(it, "large")) == {(200, "pod-1"), (200, "pod-9")}
