"""What is asked of the pods without any request: what they report, and whether they are well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.datastore import Fleet
from proxy.fleet.model_reads import ModelRounds
from proxy.fleet.runner import FleetRunner
from proxy.http.upstream.fetch import PooledFetcher
from proxy.http.upstream.trust import Trust
from proxy.pool_settings import PoolSettings
from proxy.reliability.health import HealthChecks
from proxy.reliability.settings import HealthSettings
from proxy.settings import Settings

FIRST_CONTACT = 5.0
"""Seconds in which the pods should have been tried once."""

SCRAPES_PER_CHECK = 4
"""Scrapes of a pod between two health checks, at least: large fleets are asked less often."""


class Asked(NamedTuple):
    """A pool: `stack` ends its being asked."""

    scraper: PooledFetcher
    runner: FleetRunner
    stack: AsyncExitStack


class Asking:
    """Goes on from `begin` until the stack that it is given is closed."""

    def __init__(
        self, fleet: Fleet, trust: Trust, clock: Clock, rng: Random, failed: Callable[[Endpoint, str], None]
    ) -> None:
        """`failed`: see HealthChecks."""
        self._fleet = fleet
        self._trust = trust
        self._clock = clock
        self._random = rng
        self._failed = failed
        self._asked: dict[str, Asked] = {}
        self._checks = AsyncExitStack()
        self._tasks = Tasks()
        self._rounds = ModelRounds(self._read_models, clock, self._tasks)

    async def begin(self, stack: AsyncExitStack, settings: Settings) -> None:
        self._begun = await stack.enter_async_context(AsyncExitStack())
        for name, pool in settings.all_pools.items():
            await self._begin(name, pool)
        await stack.enter_async_context(self._tasks)
        await stack.enter_async_context(self._checks)
        await self._begin_checks(settings.reliability.health)

    async def first_contact(self) -> None:
        """Returns when as much is known of the pods as requests need."""
        await asyncio.gather(*(asked.runner.first_contact(FIRST_CONTACT) for asked in self._asked.values()))

    def next_round(self) -> asyncio.Future[None]:
        """See ModelReads, here and below."""
        return self._rounds.next()

    def read_soon(self, endpoint: Endpoint) -> None:
        self._read_models_of(endpoint)

    async def change(self, before: Settings, settings: Settings) -> None:
        """Pods may go from one pool to another: all pools let go of theirs before any takes them."""
        pools, pools_before = settings.all_pools, before.all_pools
        for name in self._asked.keys() - pools.keys():
            await self._asked.pop(name).stack.aclose()
        for name, asked in self._asked.items():
            asked.runner.let_go(pools[name].pods)
        for name, pool in pools.items():
            if name not in self._asked:
                await self._begin(name, pool)
                continue
            asked, was = self._asked[name], pools_before[name]
            asked.scraper.timeout = pool.pods.refresh.timeout
            if (pool.pods, pool.engines) != (was.pods, was.engines):
                asked.runner.change(pool.pods, pool.engines)
        if settings.reliability.health != before.reliability.health:
            await self._checks.aclose()
            await self._begin_checks(settings.reliability.health)

    async def _begin(self, name: str, pool: PoolSettings) -> None:
        stack, clock = AsyncExitStack(), self._clock
        self._begun.push_async_callback(stack.aclose)
        scraper = await stack.enter_async_context(PooledFetcher(pool.pods.refresh.timeout, clock, self._trust))
        runner = FleetRunner(self._fleet, pool.pods, scraper, clock, self._random, pool.engines, name)
        await stack.enter_async_context(runner)
        self._asked[name] = Asked(scraper, runner, stack)

    async def _begin_checks(self, settings: HealthSettings) -> None:
        stack, fleet = self._checks, self._fleet
        timeouts = [settings.timeout] if settings.inference is None else [settings.timeout, settings.inference.timeout]
        asker = await stack.enter_async_context(PooledFetcher(max(timeouts), self._clock, self._trust))
        await stack.enter_async_context(
            HealthChecks(settings, fleet.watch, fleet, asker, self._random, self._failed, self._shortest)
        )

    def _read_models(self) -> list[asyncio.Future[None]]:
        reads = map(self._read_models_of, self._fleet.ready)
        return [read for read in reads if read is not None]

    def _read_models_of(self, endpoint: Endpoint) -> asyncio.Future[None] | None:
        asked = self._asked.get(endpoint.pool)
        return asked.runner.read_models(endpoint) if asked else None

    def _shortest(self, endpoint: Endpoint) -> float:
        asked = self._asked.get(endpoint.pool)
        return SCRAPES_PER_CHECK * asked.runner.interval_of(endpoint) if asked else 0.0
