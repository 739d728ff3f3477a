"""What the autoscaler sees of prefill and decode pods that serve."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.scenarios.disagg import PROMPT, ROLES, SIM
from tests.helpers.scenarios.stack import Stack, stack
from tests.helpers.waiting import PATIENCE

EXAMPLES = Path(__file__).parents[3] / "config"


def sections() -> dict[str, Any]:
    """The policies of the examples."""
    example = yaml.safe_load((EXAMPLES / "disaggregated.yaml").read_text())
    policy = yaml.safe_load((EXAMPLES / "autoscale" / "prefill-decode.yaml").read_text())["autoscale"]
    handler = {"type": "always-disagg-pd-decider"}
    plugins = [*example["scheduling"]["plugins"], handler]
    for plugin in plugins:
        if plugin["type"] == "disagg-profile-handler":
            plugin["parameters"] = {"deciders": {"prefill": handler["type"]}}
    scheduling = {**example["scheduling"], "plugins": plugins}
    return {
        "disaggregation": {"connector": "nixl"},
        "scheduling": scheduling,
        "autoscale": {**policy, "interval": "50ms"},
    }


async def seen(running: Stack) -> dict[str, Any]:
    """The next decision."""
    before = running.app.autoscaling.pools["default"].loop.history[-1].id
    async with asyncio.timeout(PATIENCE):
        while running.app.autoscaling.pools["default"].loop.history[-1].id <= before + 1:
            await asyncio.sleep(0.01)
    _, found = await running.operate("GET", "/autoscale/pools/default")
    roles: dict[str, Any] = found["roles"]
    return roles


async def test_each_role_is_sized_by_its_work() -> None:
    configs = [replace(SIM, role=role, connector="nixl") for role in ROLES]
    async with stack(4, configs, sections(), [{"role": role} for role in ROLES]) as running:
        await asyncio.sleep(0.2)
        idle = await seen(running)
        assert (idle["prefill"]["current"], idle["decode"]["current"]) == (2, 2)
        assert "ttft" in idle["prefill"]["missing"], "without traffic it is unknown"
        assert idle["prefill"]["metrics"]["prefill_backlog_seconds"] is None, "nothing was learnt yet"
        for number in range(24):
            response, _ = await running.chat(f"{number} {PROMPT}", max_tokens=2)
            assert response.status == 200
        busy = await seen(running)
        assert busy["prefill"]["signals"]["ttft"] > 0
        assert "ttft" not in busy["decode"]["signals"], "the decode attempt's includes the prefill"
        assert busy["prefill"]["metrics"]["prefill_backlog_seconds"] >= 0
        assert len(busy["decode"]["metrics"]["kv_cache_utilization"]) == 2
        backlog = 'kvlane_autoscale_prefill_backlog_seconds{pool="default",role="prefill"}'
        assert await running.sample(backlog) is not None
