"""Stores that do not work as wanted: no request waits for them, and `/readyz` shows their error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from proxy.cluster.redis_transport import Lease, RedisConnection, StoreLost
from tests.helpers.cluster.store import Store, Wall, needs_redis, store
from tests.helpers.ports import free_port
from tests.helpers.waiting import until
from tests.system.cluster.test_deployment import SHORT, Deployed, Proxy, settings

pytestmark = needs_redis


@asynccontextmanager
async def deployed_on(folder: Path, *options: str) -> AsyncIterator[Deployed]:
    async with store(folder, *options) as redis, AsyncExitStack() as stack:
        yield Deployed(stack, redis)


async def goes_on_alone(proxy: Proxy, why: str) -> None:
    await until(lambda: why in proxy.deployment.status().get("why", ""))
    await until(lambda: proxy.knows == 0)
    proxy.dispatch(1)
    assert (proxy.pod.load.requests, proxy.deployment.is_connected) == (1, False)


async def know_each_other(one: Proxy, two: Proxy) -> None:
    await until(lambda: one.knows == two.knows == 1)
    one.dispatch(3)
    await until(lambda: two.remote == 3)


async def reply_to(redis: Store, *words: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
    writer.write(" ".join(words).encode() + b"\r\n")
    raw = await reader.readline()
    writer.close()
    return raw


@pytest.mark.parametrize(
    ("options", "path", "why"),
    [
        ((), "/99", "DB index is out of range"),
        (("--requirepass", "secret"), "/0", "must be called with the client already authenticated"),
        (("--user", "default", "on", "nopass", "~*", "&*", "+@all", "-publish"), "/0", "no permissions"),
        (("--user", "default", "on", "nopass", "~*", "&*", "+@all", "-subscribe"), "/0", "no permissions"),
        (("--user", "default", "on", "nopass", "~*", "resetchannels", "+@all"), "/0", "no permissions"),
    ],
)
async def test_a_refusing_store_is_reported_with_its_reason(
    tmp_path: Path, options: tuple[str, ...], path: str, why: str
) -> None:
    async with deployed_on(tmp_path, *options) as deployed:
        await goes_on_alone(await deployed.join(deployed.redis.url.removesuffix("/0") + path), why)


async def test_a_full_store_is_retried_until_it_accepts(tmp_path: Path) -> None:
    async with deployed_on(tmp_path, "--maxclients", "2") as deployed, AsyncExitStack() as first:
        one = Proxy(settings(deployed.redis.url))
        await first.enter_async_context(one.deployment)
        await until(lambda: one.deployment.is_connected)
        two = await deployed.join()
        await goes_on_alone(two, "max number of clients")
        await one.replica.close()
        await first.aclose()
        await until(lambda: two.deployment.is_connected)


async def test_a_store_that_accepts_and_does_not_respond_is_given_up(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with deployed_on(tmp_path) as deployed, server:
        one = await deployed.join(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        await goes_on_alone(one, "no reply")


async def test_a_distant_store_works(tmp_path: Path) -> None:
    async with deployed_on(tmp_path) as deployed, Wall(deployed.redis.port, 0.1) as far:
        one, two = await deployed.join(far.url), await deployed.join(far.url)
        await know_each_other(one, two)
        await until(lambda: one.deployment.status()["staleness"] >= 0.1)


async def test_a_read_only_replica_passes_messages_and_grants_no_lease(tmp_path: Path) -> None:
    async with deployed_on(tmp_path, "--replicaof", "127.0.0.1", str(free_port())) as deployed:
        await know_each_other(await deployed.join(), await deployed.join())
        await _gives_no_lease(deployed.redis.url)


async def test_a_store_without_memory_passes_messages(tmp_path: Path) -> None:
    async with deployed_on(tmp_path, "--maxmemory", "1") as deployed:
        await know_each_other(await deployed.join(), await deployed.join())
        assert (
            await reply_to(deployed.redis, "SET", "a", "b")
            == b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        )
        await _gives_no_lease(deployed.redis.url)


async def test_a_cluster_that_is_down_passes_messages(tmp_path: Path) -> None:
    options = "--cluster-enabled", "yes", "--cluster-port", str(free_port())
    async with deployed_on(tmp_path, *options) as deployed:
        await know_each_other(await deployed.join(), await deployed.join())
        assert (await reply_to(deployed.redis, "SET", "a", "b")).startswith(b"-CLUSTERDOWN")
        await _gives_no_lease(deployed.redis.url)


async def test_a_lost_permission_to_publish_is_reported_and_recovers(tmp_path: Path) -> None:
    """Publishing asks for no replies, so it is noticed by what does not come back."""
    async with deployed_on(tmp_path) as deployed:
        one, two = await deployed.pair(lease=SHORT)
        await reply_to(deployed.redis, "ACL", "SETUSER", "default", "-publish")
        await goes_on_alone(one, "no permissions")
        await until(lambda: two.knows == 0)
        await reply_to(deployed.redis, "ACL", "SETUSER", "default", "+publish")
        await until(lambda: one.knows == two.knows == 1 and two.remote == 1)


async def test_repeatedly_cut_connections_leak_no_sockets(tmp_path: Path) -> None:
    async with deployed_on(tmp_path) as deployed:
        one, two = await deployed.pair()
        before = len(os.listdir("/proc/self/fd"))
        for losses in range(1, 6):
            await reply_to(deployed.redis, "CLIENT", "KILL", "TYPE", "pubsub")
            await until(lambda: one.series.losses.value >= losses and two.series.losses.value >= losses)  # noqa: B023
            await until(lambda: one.deployment.is_connected and two.deployment.is_connected)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        await know_each_other(one, two)


async def test_a_failure_of_a_message_counts_as_a_lost_connection(tmp_path: Path) -> None:
    def fails(message: bytes) -> None:
        raise ArithmeticError("an unexpected error")

    async with (
        deployed_on(tmp_path) as deployed,
        RedisConnection(settings(deployed.redis.url), ("a",), fails) as line,
    ):
        line.publish("a", b"message")
        with pytest.raises(StoreLost, match="ArithmeticError"):
            await line.lost()
        line.publish("a", b"to nobody")


async def _gives_no_lease(url: str) -> None:
    lease = Lease(settings(url), "autoscale", 60.0)
    assert not await lease.acquire()
    await lease.release()
    await lease.close()
