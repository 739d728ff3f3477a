"""Keys and limits hold for all workers of a host together, and for the one admin port."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from tests.helpers.cluster.host import CHAT, Host, host, question

FEW = {
    "apiKeys": [
        {"name": "a", "key": "k", "limits": {"requestsPerMinute": 6}},
        {"name": "ops", "key": "of-ops", "scopes": ["admin"]},
    ]
}


async def ask(it: Host, key: str = "k") -> int:
    """Over a connection of its own; the status."""
    async with (
        aiohttp.ClientSession(headers={"x-api-key": key}) as http,
        http.post(it.url + CHAT, json=question("Hello!", 1)) as response,
    ):
        await response.read()
        return response.status


async def test_two_workers_grant_a_key_no_more_than_its_limit() -> None:
    async with host(2, security=FEW) as it:
        seen, began = [], time.monotonic()
        for _ in range(16):
            seen.append(await ask(it))
            await asyncio.sleep(0.1)
        come_back = int((time.monotonic() - began) / 10.0)
        assert set(seen) == {200, 429}
        assert 6 <= seen.count(200) <= 6 + come_back
        assert await ask(it, "wrong") == 401
        pods = f"http://127.0.0.1:{it.supervisor.admin_port}/admin/pods"
        for key, status in (("of-ops", 200), ("k", 403), ("wrong", 401)):
            async with it.admin_http.get(pods, headers={"x-api-key": key}) as response:
                assert response.status == status
