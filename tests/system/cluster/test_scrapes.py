"""Proxies of one deployment over a real Redis scrape each pod once, and each pod of their own without the others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.app import App
from proxy.cli.serve import app_of
from proxy.cluster.supervisor import Supervisor
from proxy.core.endpoint import DEFAULT_POOL
from proxy.fleet.refresh import ScrapeBudget
from proxy.settings import from_mapping
from tests.helpers.cli.kvlane import kvlane
from tests.helpers.cluster.store import Store, needs_redis, store
from tests.helpers.fleet.pods import FakePod, exposition
from tests.helpers.ports import free_port
from tests.helpers.waiting import until

pytestmark = needs_redis

PODS, ROUNDS = 16, 10


class Site:
    def __init__(self, stack: AsyncExitStack, redis: Store, pods: list[FakePod]) -> None:
        self._stack = stack
        self.redis = redis
        self.pods = pods

    @property
    def config(self) -> dict[str, Any]:
        return {
            "listen": {"host": "127.0.0.1", "port": free_port()},
            "admin": {"host": "127.0.0.1", "port": free_port()},
            "pods": {
                "static": [{"url": pod.url, "name": f"pod-{index}"} for index, pod in enumerate(self.pods)],
                "refresh": {"maxCore": 1},
            },
            "replicas": {"store": self.redis.url},
            "telemetry": {"accessLog": False, "logLevel": "error"},
        }

    async def proxy(self) -> App:
        return await self._stack.enter_async_context(app_of(from_mapping(self.config)))

    async def host(self) -> Supervisor:
        return await self._stack.enter_async_context(Supervisor(from_mapping(self.config), 1))

    @property
    def scrapes(self) -> int:
        return sum(pod.requested.count("/metrics") for pod in self.pods)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(store(tmp_path))
        yield Site(stack, redis, [await stack.enter_async_context(FakePod()) for _ in range(PODS)])


def budget(proxy: App | Supervisor) -> ScrapeBudget:
    polling = proxy._polling if isinstance(proxy, Supervisor) else proxy._process.polling
    assert polling is not None
    return polling.runners[DEFAULT_POOL].budget


def running(proxy: App | Supervisor) -> set[int]:
    return {pod.metrics.running for pod in proxy.fleet.endpoints}


async def test_a_second_proxy_adds_no_scrapes(site: Site) -> None:
    own = budget(await site.proxy())
    assert own.pods == PODS
    other = budget(await site.proxy())
    await until(lambda: own.pods + other.pods == PODS)
    scrapes, before = site.scrapes, own.rounds
    await until(lambda: own.rounds >= before + ROUNDS * own.pods)
    assert site.scrapes - scrapes < 1.5 * ROUNDS * PODS


async def test_a_proxy_scrapes_the_pods_of_another_one_that_is_killed(site: Site, tmp_path: Path) -> None:
    own = budget(one := await site.proxy())
    file = tmp_path / "kvlane.yaml"
    file.write_text(json.dumps(site.config))
    with kvlane("serve", "-c", str(file)) as other:
        await until(lambda: 0 < own.pods < PODS)
        for pod in site.pods:
            pod.bodies["/metrics"] = exposition(running=3)
        await until(lambda: running(one) == {3})
        other.kill()
    for pod in site.pods:
        pod.bodies["/metrics"] = exposition(running=4)
    await until(lambda: running(one) == {4})
    await until(lambda: own.pods == PODS)


async def test_without_the_store_each_proxy_scrapes_all_pods(site: Site) -> None:
    one, two = await site.proxy(), await site.proxy()
    await until(lambda: budget(one).pods + budget(two).pods == PODS)
    site.redis.kill()
    for pod in site.pods:
        pod.bodies["/metrics"] = exposition(running=4)
    await until(lambda: running(one) == running(two) == {4})
    await until(lambda: budget(one).pods == budget(two).pods == PODS)
    await site.redis.start()
    await until(lambda: budget(one).pods + budget(two).pods == PODS)


async def test_a_proxy_and_a_host_with_workers_divide_the_scrapes(site: Site) -> None:
    one, host = await site.proxy(), await site.host()
    await until(lambda: 0 < budget(host).pods < PODS and budget(one).pods + budget(host).pods == PODS)
    for pod in site.pods:
        pod.bodies["/metrics"] = exposition(running=5)
    await until(lambda: running(one) == running(host) == {5})
