"""Which one of several proxies scales: the one that has the lease, where they share a store."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Protocol

from proxy.core.tasks import Tasks
from proxy.replicas.lease import Lease
from proxy.replicas.settings import ReplicaSettings

log = logging.getLogger(__name__)

NAME = "autoscale"
SECONDS = 30.0
"""For which a lease holds; it is taken again after a third of that."""


class Leasing(Protocol):
    """`replicas.lease.Lease` is one."""

    async def take(self) -> bool: ...
    async def release(self) -> None: ...
    async def close(self) -> None: ...


class Lead:
    """`is_ours`: always, where nobody else could have it."""

    def __init__(self) -> None:
        self.is_ours = True
        self._lease: Leasing | None = None

    async def begin(self, stack: AsyncExitStack, settings: ReplicaSettings) -> None:
        if settings.is_shared:
            await self.share(stack, Lease(settings, NAME, SECONDS))

    async def share(self, stack: AsyncExitStack, lease: Leasing, every: float = SECONDS / 3) -> None:
        self._lease, self.is_ours = lease, False
        stack.push_async_callback(self._end)
        tasks = await stack.enter_async_context(Tasks())
        tasks.start(self._keep(lease, every), "lease of the autoscaler")

    async def _keep(self, lease: Leasing, every: float) -> None:
        while True:
            taken = await lease.take()
            if taken is not self.is_ours:
                log.info("autoscale: this proxy %s", "scales from here on" if taken else "leaves scaling to another")
            self.is_ours = taken
            await asyncio.sleep(every)

    async def _end(self) -> None:
        if self._lease is not None:
            if self.is_ours:
                await self._lease.release()
            await self._lease.close()
