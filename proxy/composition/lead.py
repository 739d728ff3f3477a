"""Which one of several proxies scales: the one that has the lease, where they share a store."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from math import inf
from typing import Protocol

from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.replicas.lease import Lease
from proxy.replicas.settings import ReplicaSettings

log = logging.getLogger(__name__)

NAME = "autoscale"
SECONDS = 30.0
"""For which a lease holds; it is taken again after a third of that."""


class Leasing(Protocol):
    """`replicas.lease.Lease` is one."""

    @property
    def seconds(self) -> float: ...

    async def take(self) -> bool: ...
    async def release(self) -> None: ...
    async def close(self) -> None: ...


class Lead:
    """Always ours, where nobody else could have it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until = inf
        self._lease: Leasing | None = None

    @property
    def is_ours(self) -> bool:
        """Not for longer than the lease holds: a process that got no CPU meanwhile has lost it before it can say so."""
        return self._clock.now() < self._until

    async def begin(self, stack: AsyncExitStack, settings: ReplicaSettings) -> None:
        if settings.is_shared:
            await self.share(stack, Lease(settings, NAME, SECONDS))

    async def share(self, stack: AsyncExitStack, lease: Leasing, every: float = SECONDS / 3) -> None:
        self._lease, self._until = lease, -inf
        stack.push_async_callback(self._end)
        tasks = await stack.enter_async_context(Tasks())
        tasks.keep(lambda: self._keep(lease, every), "lease-of-the-autoscaler")

    async def _keep(self, lease: Leasing, every: float) -> None:
        was_ours = False
        while True:
            asked_at = self._clock.now()
            taken = await lease.take()
            if taken is not was_ours:
                log.info("autoscale: this proxy %s", "scales from here on" if taken else "leaves scaling to another")
            was_ours, self._until = taken, asked_at + lease.seconds if taken else -inf
            await asyncio.sleep(every)

    async def _end(self) -> None:
        if self._lease is not None:
            if self.is_ours:
                await self._lease.release()
            self._until = -inf
            await self._lease.close()
