"""Names of models and pods that sleep, whichever worker gets the request."""

from __future__ import annotations

import asyncio

import aiohttp

from proxy.lab.sim import SimConfig
from tests.helpers.cluster.host import CHAT, Host, host, question, ready_pods, until_workers_show
from tests.helpers.waiting import until

RARELY = {"interval": "60s"}
"""Without a reason, models are read from pods before the first request only."""

MODELS = {"aliases": {"gpt-4o": "sim"}, "wake": {"enabled": True}}


async def ask(it: Host) -> tuple[str, str]:
    """Over a new connection: the pod that responded, and the name that it gave."""
    body = {**question("Hello!", 1), "model": "gpt-4o"}
    async with aiohttp.ClientSession() as http, http.post(it.url + CHAT, json=body) as response:
        assert response.status == 200
        assert response.headers["x-kvlane-model"] == "sim"
        return response.headers["x-kvlane-endpoint"], (await response.json())["model"]


async def nap(it: Host, http: aiohttp.ClientSession, number: int) -> None:
    """Until all workers know."""
    async with http.post(f"{it.sim.pods[number].url}/sleep"):
        await until(lambda: len(it.supervisor.fleet.ready) == 1 - number)
    await until_workers_show(it.supervisor, lambda lines: ready_pods(1 - number) in lines)


async def test_workers_share_names_and_sleeping_pods_and_wake_them_once() -> None:
    async with host(2, pods=2, models=MODELS) as it, aiohttp.ClientSession() as http:
        assert {name for _, name in [await ask(it) for _ in range(6)]} == {"gpt-4o"}
        rewrites = 'kvlane_model_rewrites_total{model="sim",rule="alias"}'
        assert (await it.samples(rewrites))[rewrites] == 6
        await nap(it, http, 0)
        assert {pod for pod, _ in [await ask(it) for _ in range(8)]} == {"pod-1"}
        await nap(it, http, 1)
        assert (await it.admin("GET", "/readyz"))["ready"]
        responses = await asyncio.gather(*(ask(it) for _ in range(8)))
        assert len({pod for pod, _ in responses}) == 1
        assert sorted(pod.engine.sleep_level for pod in it.sim.pods) == [0, 1]


async def test_every_worker_finds_an_adapter_that_is_loaded_at_run_time() -> None:
    config = [SimConfig(model="base", time_scale=20), SimConfig(model="base", time_scale=20)]
    async with host(2, pods=2, config=config, refresh=RARELY) as it:
        it.sim.pods[1].serve_models(lora_adapters=["poems"])
        statuses = await asyncio.gather(*(status(it, "poems") for _ in range(8)))
        assert statuses == [(200, "pod-1")] * 8
        it.sim.pods[0].serve_models("other")
        while await status(it, "other") != (200, "pod-0"):  # a read is bounded, and the machine may be slow
            pass
        assert await status(it, "invented") == (404, None)


async def test_a_404_at_one_worker_makes_the_supervisor_read_the_models_again() -> None:
    config = [SimConfig(model="base", time_scale=20), SimConfig(model="base", time_scale=20)]
    async with host(2, pods=2, config=config, refresh=RARELY) as it:
        it.sim.pods[0].serve_models("other")
        fleet = it.supervisor.fleet
        while fleet.is_listed("base") and not fleet.is_listed("other"):
            assert await status(it, "base") == (200, "pod-1")
        await until(lambda: fleet.endpoints_for("base") == (fleet.get("pod-1"),))
        assert await status(it, "other") == (200, "pod-0")


async def status(it: Host, model: str) -> tuple[int, str | None]:
    """Over a connection of its own, so that any worker may get it."""
    body = {**question("Hello!", 1), "model": model}
    async with aiohttp.ClientSession() as http, http.post(it.url + CHAT, json=body) as response:
        await response.read()
        return response.status, response.headers.get("x-kvlane-endpoint")
