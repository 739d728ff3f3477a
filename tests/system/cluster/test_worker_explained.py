"""Why, where there are several workers: the admin port knows what all of them know."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from proxy.cluster.supervisor import Supervisor
from proxy.lab.sim import SimConfig, SimFleet
from tests.helpers.cluster.host import CHAT, Host, configured, question

ON = {"accessLog": False, "logLevel": "error", "decisions": {}}


async def get(it: Host, path: str) -> tuple[int, Any]:
    async with it.admin_http.get(f"http://127.0.0.1:{it.supervisor.admin_port}{path}") as response:
        return response.status, await response.json()


async def imagine(it: Host, query: Any) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{it.supervisor.admin_port}/debug/explain"
    async with it.admin_http.post(url, json=query) as response:
        return response.status, await response.json()


async def ask(it: Host, name: str) -> None:
    """Over a connection of its own, so that any worker may get it."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(it.url + CHAT, json=question("Hello!"), headers={"x-request-id": name}) as response,
    ):
        assert response.status == 200
        await response.read()


async def test_decisions_of_all_workers_are_listed_and_one_worker_explains_a_request() -> None:
    async with (
        SimFleet(2, SimConfig(time_scale=20)) as sim,
        Supervisor(configured(sim, telemetry=ON), 2) as supervisor,
        aiohttp.ClientSession() as admin_http,
    ):
        it = Host(sim, supervisor, admin_http)
        names = [f"r{number}" for number in range(16)]
        for name in names:
            await ask(it, name)
        status, body = await get(it, "/debug/decisions?limit=12")
        assert (status, body["on"], body["kept"], body["seen"]) == (200, True, 16, 16)
        assert [one["request"] for one in body["decisions"]] == names[:3:-1]
        assert len({one["id"] for one in body["decisions"]}) == 12
        for one in body["decisions"][:4]:
            status, table = await get(it, f"/debug/decisions/{one['id']}")
            assert (status, table["request"], table["outcome"]) == (200, one["request"], "complete")
        assert (await get(it, "/debug/decisions/r3"))[1]["request"] == "r3"
        assert (await get(it, "/debug/decisions/nothing"))[0] == 404
        assert (await get(it, "/debug/decisions?slow=fast"))[0] == 400
        status, table = await imagine(it, {"request": question("Hello!"), "weights": {"latency-scorer": 2}})
        assert (status, table["pod"] in ("pod-0", "pod-1")) == (200, True)
        status, body = await imagine(it, {"request": question("Hello!"), "weights": {"latency": 2}})
        assert status == 400
        assert body["error"]["message"] == (
            "No profile has the scorer 'latency'; did you mean 'latency-scorer'? The configuration has latency-scorer."
        )


@pytest.mark.parametrize("workers", [2])
async def test_recording_is_off_in_all_workers(workers: int) -> None:
    async with (
        SimFleet(1, SimConfig(time_scale=20)) as sim,
        Supervisor(configured(sim), workers) as supervisor,
        aiohttp.ClientSession() as admin_http,
    ):
        status, body = await get(Host(sim, supervisor, admin_http), "/debug/decisions")
        assert (status, body["on"], body["decisions"]) == (200, False, [])
