"""What stands behind the names of models, and who wakes those that sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.datastore import Fleet
from proxy.http.upstream.fetch import PooledFetcher
from proxy.http.upstream.trust import Trust
from proxy.models.cluster import ClusterNames
from proxy.models.resolver import Resolver
from proxy.models.series import ModelSeries
from proxy.models.settings import ClusterObjects, ModelSettings, Wake
from proxy.models.wake import Waker
from proxy.settings import Settings
from proxy.telemetry.catalogue import Catalogue


class ModelNames:
    """A resolver lasts as long as its settings, wakers as long as the stack that they were made with."""

    def __init__(self, fleet: Fleet, trust: Trust, clock: Clock, rng: Random, catalogue: Catalogue) -> None:
        self._fleet = fleet
        self._trust = trust
        self._clock = clock
        self._random = rng
        self._catalogue = catalogue
        self._made: tuple[ModelSettings, Sequence[str], Sequence[str], bool, Resolver | None] | None = None
        self._wakers: dict[Wake, Waker] = {}
        """One for each that was ever configured: requests may wait with it."""
        self._cluster: tuple[ClusterNames, asyncio.Task[None]] | None = None

    async def resolver(
        self, stack: AsyncExitStack, settings: Settings, sessions: Sequence[str], has_gates: bool
    ) -> Resolver | None:
        """None where models are what they are called, and nobody asks whose a request is. `sessions`: see Resolver."""
        models, pools = settings.models, tuple(settings.all_pools)
        if self._made is None or self._made[:-1] != (models, pools, sessions, has_gates):
            resolver = await self._make(stack, models, pools, sessions, has_gates)
            self._made = (models, pools, sessions, has_gates, resolver)
        return self._made[-1]

    @property
    def current(self) -> Resolver | None:
        return None if self._made is None else self._made[-1]

    async def _make(
        self,
        stack: AsyncExitStack,
        settings: ModelSettings,
        pools: Sequence[str],
        sessions: Sequence[str],
        has_gates: bool,
    ) -> Resolver | None:
        self._fleet.wakes = settings.wake.enabled
        await self._follow(stack, settings.kubernetes)
        if settings == ModelSettings() and not has_gates:
            return None
        waker = await self._waker(stack, settings.wake) if settings.wake.enabled else None
        if self._cluster is not None:
            settings = self._cluster[0].added_to(settings)
        others = pools if len(pools) > 1 else ()
        return Resolver(settings, self._random, ModelSeries(self._catalogue), waker, others, sessions)

    async def _follow(self, stack: AsyncExitStack, wanted: ClusterObjects | None) -> None:
        """The objects of this cluster, and no others."""
        if self._cluster is not None and self._cluster[0].settings != wanted:
            self._cluster[1].cancel()
            self._cluster = None
        if self._cluster is None and wanted is not None:
            names = ClusterNames(wanted, self._changed, self._clock, self._random)
            tasks = await stack.enter_async_context(Tasks())
            self._cluster = (names, tasks.keep(names.run, "objectives-and-rewrites-of-the-cluster"))

    def _changed(self) -> None:
        if self._made is not None and self._made[-1] is not None and self._cluster is not None:
            self._made[-1].change(self._cluster[0].added_to(self._made[0]))

    async def _waker(self, stack: AsyncExitStack, wake: Wake) -> Waker:
        if wake not in self._wakers:
            poster = await stack.enter_async_context(PooledFetcher(wake.timeout, self._clock, self._trust))
            tasks = await stack.enter_async_context(Tasks())
            self._wakers[wake] = Waker(self._fleet, poster, self._clock, tasks, wake.timeout)
        return self._wakers[wake]
