"""Hosts that know of each other over a Redis with a replica, and three sentinels that put it in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from tests.helpers.cluster.store import Store, needs_redis
from tests.helpers.ports import free_port
from tests.helpers.waiting import until
from tests.system.cluster.test_deployment import Proxy, settings

pytestmark = needs_redis

QUORUM = 2
LONG = 60.0
"""Seconds: three processes have to agree, on a machine that may have much else to do."""

MONITOR = """port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor chat 127.0.0.1 {master} {quorum}
sentinel down-after-milliseconds chat 1000
sentinel failover-timeout chat 5000
"""


async def ask(port: int, *words: str) -> list[str]:
    """The lines of a Redis's response; none without a response."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(" ".join(words).encode() + b"\r\n")
        await writer.drain()
        raw = await reader.read(1 << 16)
        writer.close()
        return raw.decode().splitlines()
    return []


class Sentinels:
    """Three, that know of each other."""

    def __init__(self, folder: Path, master: int) -> None:
        self.ports = [free_port() for _ in range(3)]
        self._folder = folder
        self._master = master
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Sentinels:
        for port in self.ports:
            folder = self._folder / str(port)
            folder.mkdir()
            conf = folder / "sentinel.conf"
            conf.write_text(MONITOR.format(port=port, folder=folder, master=self._master, quorum=QUORUM))
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    "redis-server", str(conf), "--sentinel", stdout=asyncio.subprocess.DEVNULL
                )
            )
        await self._agree("num-other-sentinels", "2")
        await self._agree("num-slaves", "1")
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            await process.wait()

    async def master(self) -> int:
        """As the first of them says."""
        lines = await ask(self.ports[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "chat")
        return int(lines[4]) if len(lines) > 4 else 0

    async def _agree(self, field: str, value: str) -> None:
        async with asyncio.timeout(LONG):
            for port in self.ports:
                while value not in _after(field, await ask(port, "SENTINEL", "MASTER", "chat")):
                    await asyncio.sleep(0.1)


def _after(field: str, lines: list[str]) -> list[str]:
    """The value of a field, in a response that alternates names and values, each after its length."""
    return lines[lines.index(field) + 2 :][:1] if field in lines else []


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[Store, Store, Sentinels]]:
    """A master, its replica, and who watches both."""
    async with AsyncExitStack() as stack:
        stores: list[Store] = []
        for name in ("master", "replica"):
            (folder / name).mkdir()
            of = () if not stores else ("--replicaof", "127.0.0.1", str(stores[0].port))
            store = Store(folder / name, *of)
            await store.start()
            stack.callback(store.kill)
            stores.append(store)
        sentinels = await stack.enter_async_context(Sentinels(folder, stores[0].port))
        yield stores[0], stores[1], sentinels


async def test_hosts_continue_over_the_new_master_after_a_failover(tmp_path: Path) -> None:
    async with watched(tmp_path) as (master, replica, sentinels), AsyncExitStack() as stack:
        url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in sentinels.ports) + "/chat"
        one, two = Proxy(settings(url, lease=2.0)), Proxy(settings(url, lease=2.0))
        for proxy in (one, two):
            await stack.enter_async_context(proxy.deployment)
        await until(
            lambda: one.deployment.is_connected and two.deployment.is_connected and one.knows == two.knows == 1, LONG
        )
        one.dispatch(2)
        await until(lambda: two.remote == 2, LONG)
        master.kill()
        one.dispatch(3)
        await until(lambda: not one.deployment.is_connected and not two.deployment.is_connected, LONG)
        async with asyncio.timeout(LONG):
            while await sentinels.master() != replica.port:
                await asyncio.sleep(0.1)
        await until(lambda: one.deployment.is_connected and two.deployment.is_connected, LONG)
        await until(lambda: two.remote == 5 and one.knows == two.knows == 1, LONG)
        two.dispatch(1)
        await until(lambda: one.remote == 1, LONG)
        for proxy in (one, two):
            await proxy.replica.close()
