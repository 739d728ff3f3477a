from __future__ import annotations

import asyncio
from typing import Any

from proxy.core.tasks import Tasks
from proxy.dashboard.feed import shadows
from proxy.dashboard.samples import Series
from proxy.lab.sim import SimConfig
from proxy.telemetry.metrics import Catalogue
from tests.helpers.dashboard.scene import events
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import PATIENCE

TENANT = "x-llm-d-inference-fairness-id"
ONE_AT_A_TIME = {
    "flowControl": {
        "maxConcurrentPerPod": 1,
        "saturation": {"detector": "concurrency", "requests": 1},
        "bands": [{"priority": 0, "name": "usual"}],
    },
    "autoscale": {"pools": {"default": {"roles": [{"name": "vllm", "min": 2, "max": 2}]}}},
}


async def test_queued_requests_are_shown_by_band_and_tenant() -> None:
    async with stack(1, SimConfig(time_scale=1), ONE_AT_A_TIME) as proxy, Tasks() as tasks:
        for tenant in ("acme", "acme", "globex", "acme"):
            tasks.start(ask(proxy, tenant), tenant)
        async with proxy.http.get(f"{proxy.admin}/dashboard/events") as reply, asyncio.timeout(PATIENCE):
            async for _, shown in events(reply):
                waiting = {} if "queues" not in shown else by_tenant(shown)
                if sum(waiting.values()) == 3:
                    break
        assert waiting.keys() == {"acme", "globex"} or waiting == {"acme": 3}
        (pool,) = shown["queues"]
        assert pool["saturation"] >= 1.0
        assert pool["bands"][0]["name"] == "usual"


def by_tenant(shown: Any) -> dict[str, int]:
    return {one["name"]: one["waiting"] for one in shown["queues"][0]["bands"][0]["tenants"]}


async def ask(proxy: Stack, tenant: str) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Tell me all."}], "max_tokens": 4000}
    async with proxy.http.post(proxy.url + CHAT, json={**body, "ignore_eos": True}, headers={TENANT: tenant}) as reply:
        await reply.read()


async def test_the_recommendation_is_shown_for_each_role() -> None:
    async with (
        stack(1, settings=ONE_AT_A_TIME) as proxy,
        proxy.http.get(f"{proxy.admin}/dashboard/events") as reply,
        asyncio.timeout(PATIENCE),
    ):
        async for _, shown in events(reply):
            roles = [pool.get("roles") for pool in shown.get("scaling", ())]
            if any(roles):
                break
        assert roles[0]["vllm"]["desired"] == 2
        assert roles[0]["vllm"]["current"] == 1


def test_a_shadow_profile_shows_how_often_it_agreed_and_what_it_would_have_saved() -> None:
    catalogue = Catalogue("test")
    catalogue.shadow.cell("new", "true").add(3)
    catalogue.shadow.cell("new", "false").add(2)
    catalogue.shadow_regret.cell("new", "shadow").observe(0.5)
    catalogue.shadow_regret.cell("new", "shadow").observe(1.5)
    assert shadows(Series(catalogue.families)) == [
        {"profile": "new", "agreed": 3, "differed": 2, "sooner": [2, 2.0], "later": [0.0, 0.0]}
    ]
