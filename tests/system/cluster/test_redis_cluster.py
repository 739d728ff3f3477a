"""Hosts that know of each other over a real Redis Cluster of three nodes, each over another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from proxy.cluster.redis_transport import Lease
from tests.helpers.cluster.store import Store, needs_redis
from tests.helpers.ports import free_port
from tests.helpers.waiting import until
from tests.system.cluster.test_deployment import Proxy, settings
from tests.system.cluster.test_failover import LONG, ask

pytestmark = needs_redis

SLOTS = 16384


class Cluster:
    """Three masters without replicas, each with a third of the slots."""

    def __init__(self, folder: Path) -> None:
        self._buses = [free_port() for _ in range(3)]
        self.nodes = [Store(_made(folder / str(number)), *_options(bus)) for number, bus in enumerate(self._buses)]

    async def __aenter__(self) -> Cluster:
        for node in self.nodes:
            await node.start()
        first = self.nodes[0].port
        for number, (node, bus) in enumerate(zip(self.nodes, self._buses, strict=True)):
            low, high = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
            await ask(node.port, "CLUSTER", "ADDSLOTSRANGE", str(low), str(high))
            await ask(first, "CLUSTER", "MEET", "127.0.0.1", str(node.port), str(bus))
        async with asyncio.timeout(LONG):
            for node in self.nodes:
                while not {"cluster_state:ok", "cluster_known_nodes:3"} <= set(await ask(node.port, "CLUSTER", "INFO")):
                    await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()

    def url(self, number: int) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[number].port}"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _options(bus: int) -> list[str]:
    return ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000"]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as found:
        yield found


async def test_hosts_on_different_nodes_share_state_and_survive_a_node(cluster: Cluster) -> None:
    async with AsyncExitStack() as stack:
        hosts = [Proxy(settings(cluster.url(number), lease=2.0)) for number in range(3)]
        for host in hosts:
            await stack.enter_async_context(host.deployment)
            stack.push_async_callback(host.replica.close)
        await until(lambda: all(host.knows == 2 and host.deployment.is_connected for host in hosts), LONG)
        for number, host in enumerate(hosts, 1):
            host.dispatch(number)
        await until(lambda: all(host.pod.load.requests == 6 for host in hosts), LONG)
        hosts[0].remember([1, 2, 3])
        await until(lambda: all(host.depth([1, 2, 3]) == 3 for host in hosts), LONG)
        cluster.nodes[2].kill()
        await until(lambda: not hosts[2].deployment.is_connected and hosts[0].knows == hosts[1].knows == 1, LONG)
        hosts[0].dispatch(1)
        await until(lambda: [host.pod.load.requests for host in hosts] == [4, 4, 3], LONG)
        await cluster.nodes[2].start()
        await until(lambda: all(host.knows == 2 and host.deployment.is_connected for host in hosts), LONG)
        await until(lambda: all(host.pod.load.requests == 7 for host in hosts), LONG)


async def test_a_host_switches_to_the_next_node(cluster: Cluster) -> None:
    url = f"{cluster.url(2)},127.0.0.1:{cluster.nodes[0].port}"
    async with AsyncExitStack() as stack:
        one, two = (Proxy(settings(each, lease=2.0)) for each in (url, cluster.url(1)))
        for host in (one, two):
            await stack.enter_async_context(host.deployment)
            stack.push_async_callback(host.replica.close)
        await until(
            lambda: one.knows == two.knows == 1 and one.deployment.is_connected and two.deployment.is_connected, LONG
        )
        cluster.nodes[2].kill()
        await until(lambda: one.series.losses.value >= 1, LONG)
        await until(lambda: one.deployment.is_connected and one.knows == two.knows == 1, LONG)
        one.dispatch(2)
        await until(lambda: two.remote == 2, LONG)
        lease = Lease(settings(url), "of a node that may be there", 30.0)
        await lease.acquire()  # its key is not available now; it does not hang, and does not fail
        await lease.close()
        await cluster.nodes[2].start()


async def test_a_lease_is_unique_over_all_nodes(cluster: Cluster) -> None:
    for name in ("autoscale", "a", "b", "c", "d"):
        leases = [Lease(settings(cluster.url(number)), name, 30.0) for number in range(3)]
        try:
            assert [await lease.acquire() for lease in leases] == [True, False, False]
            assert await leases[0].acquire()
            await leases[1].release()
            assert not await leases[2].acquire()
            await leases[0].release()
            assert await leases[2].acquire()
        finally:
            for lease in leases:
                await lease.close()
