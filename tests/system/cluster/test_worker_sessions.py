"""Sessions stay with their pod, whichever worker gets the request."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.helpers.cluster.host import CHAT, Host, host, question
from tests.helpers.waiting import PATIENCE

BY_ID = {
    "plugins": [
        {"type": "session-affinity-filter", "parameters": {"strategy": "session_id", "rebalance": {}}},
        {"type": "random-picker"},
    ],
    "schedulingProfiles": [
        {"name": "default", "plugins": [{"pluginRef": "session-affinity-filter"}, {"pluginRef": "random-picker"}]}
    ],
}


async def ask(it: Host, session: str) -> str:
    """Over a new connection; the name of the pod that responded."""
    headers = {"x-session-id": session}
    async with (
        aiohttp.ClientSession() as http,
        http.post(it.url + CHAT, json=question("Hello!", 1), headers=headers) as response,
    ):
        response.raise_for_status()
        await response.read()
        return response.headers["x-kvlane-endpoint"]


async def test_two_workers_choose_the_same_pod_for_a_session() -> None:
    async with host(2, pods=4, scheduling=BY_ID) as it:
        for number in range(8):
            await _agree(it, f"session {number}")
            assert len({await ask(it, f"session {number}") for _ in range(12)}) == 1


async def _agree(it: Host, session: str) -> None:
    """Until all workers know where it is. A worker that does not may send it elsewhere, and then it is there."""
    async with asyncio.timeout(PATIENCE):
        while len({await ask(it, session) for _ in range(12)}) > 1:
            await asyncio.sleep(0.05)
