"""Which of several proxies scales, by leases in a real Redis."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from proxy.autoscale.autoscaling import Leadership
from proxy.cluster.redis_transport import Lease
from proxy.core.ports import SystemClock
from proxy.core.tasks import failures
from tests.helpers.cluster.store import needs_redis, store
from tests.helpers.ports import free_port
from tests.helpers.waiting import until
from tests.system.cluster.test_deployment import settings

SECONDS = 4.0
"""More than a machine stands still: the store goes on meanwhile."""


@needs_redis
async def test_one_of_three_leads_another_one_when_it_is_gone_and_none_without_the_store(tmp_path: Path) -> None:
    async with store(tmp_path) as redis:
        leads = [Leadership(SystemClock()) for _ in range(3)]
        stacks = [AsyncExitStack() for _ in leads]
        for lead, stack in zip(leads, stacks, strict=True):
            await lead.share(stack, Lease(settings(redis.url), "autoscale", SECONDS), every=SECONDS / 5)
        leading: set[int] = set()

        def there_is_one() -> bool:
            ours = [number for number, lead in enumerate(leads) if lead.is_ours]
            assert len(ours) <= 1
            leading.update(ours)
            return bool(ours)

        try:
            await until(there_is_one)
            (first,) = leading
            await stacks[first].aclose()
            leading.clear()
            await until(there_is_one)
            assert first not in leading
            redis.kill()
            await until(lambda: not any(lead.is_ours for lead in leads))
            await asyncio.sleep(SECONDS / 2)
            assert not any(lead.is_ours for lead in leads)
            await redis.start()
            await until(there_is_one)
        finally:
            for stack in stacks:
                await stack.aclose()


@needs_redis
async def test_a_leader_that_crashes_is_replaced_when_its_lease_expires(tmp_path: Path) -> None:
    async with store(tmp_path) as redis, AsyncExitStack() as stack:
        dead = Lease(settings(redis.url), "autoscale", SECONDS)
        assert await dead.acquire()
        await dead.close()
        lead = Leadership(SystemClock())
        await lead.share(stack, Lease(settings(redis.url), "autoscale", SECONDS), every=SECONDS / 5)
        assert not lead.is_ours
        await until(lambda: lead.is_ours)


async def test_another_prefix_has_its_own_lease(tmp_path: Path) -> None:
    async with store(tmp_path) as redis:
        one, two = (Lease(settings(redis.url, prefix=prefix), "autoscale", 30.0) for prefix in ("a", "b"))
        assert await one.acquire()
        assert await two.acquire()
        await one.close()
        await two.close()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_proxy_that_reaches_no_node_of_the_store_keeps_trying_to_get_the_lease(scheme: str) -> None:
    failed_before = failures["lease-of-the-autoscaler"]
    path = "/main" if scheme == "redis+sentinel" else ""
    queried = Counting(settings(f"{scheme}://127.0.0.1:{free_port()}{path}"), "autoscale", SECONDS)
    async with AsyncExitStack() as stack:
        lead = Leadership(SystemClock())
        await lead.share(stack, queried, every=0.01)
        await until(lambda: queried.times > 3)
        assert not lead.is_ours
        assert failures["lease-of-the-autoscaler"] == failed_before


class Counting(Lease):
    """A lease that counts its attempts."""

    times = 0

    async def acquire(self) -> bool:
        self.times += 1
        return await super().acquire()
