"""Starts and stops discovery and one refresh loop per pod."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from proxy.core.endpoint import DEFAULT_POOL, Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.dialects import Dialects
from proxy.fleet.discovery import Source
from proxy.fleet.refresh import Refresher, ScrapeBudget, Scraped
from proxy.fleet.scrape import Fetcher
from proxy.fleet.settings import PodSettings, PodSources
from proxy.fleet.store import Fleet, PoolPods

SWEEP_INTERVAL = 0.1

FIRST_POD_INTERVAL = 0.5
"""Seconds between two looks for pods while the fleet has none: every request is refused until one is found."""

FIRST_GAP = 0.0005
"""Seconds between the first scrapes of pods that join together: 500 at once would block the loop for 0.1 s."""


STATIC = "static"
"""The source of the pods that the configuration lists."""


def named(source: str, pool: str) -> str:
    """Return the name under which the pods of a source of a pool are known to the fleet."""
    return source if pool == DEFAULT_POOL else f"{source} of {pool}"


@dataclass(eq=False)
class FleetRunner:
    """Discovery and scraping of the pods of a pool, inside `async with`."""

    _fleet: Fleet
    _settings: PodSources
    _fetcher: Fetcher
    _clock: Clock
    _rng: Random
    _configured_dialects: Dialects = field(default_factory=Dialects)
    pool: str = DEFAULT_POOL
    scraped: Scraped = lambda *_: None

    def __post_init__(self) -> None:
        refresh = self._settings.refresh
        self._dialects = self._configured_dialects.with_attributes(refresh.attributes)
        self._polled: dict[str, asyncio.Event] = {}
        self._searches: list[asyncio.Task[None]] = []
        self._loops: dict[Endpoint, tuple[Refresher, asyncio.Task[None]]] = {}
        self._tasks = Tasks()
        self._next_start = 0.0
        self.budget = ScrapeBudget(refresh.interval, refresh.max_core)

    async def __aenter__(self) -> FleetRunner:
        self._reconcile(STATIC, self._settings.static)
        self._unwatch = PoolPods(self._fleet, self.pool).watch(self._added, self._removed)
        self._discover_by(self._sources(self._settings))
        self._tasks.keep(self._sweep, "sweep-of-removed-pods")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unwatch()
        await self._tasks.stop()

    @property
    def settings(self) -> tuple[PodSources, Dialects]:
        """Where they change, pods that both have stay as they are; pods of a source that is gone leave."""
        return self._settings, self._configured_dialects

    @settings.setter
    def settings(self, wanted: tuple[PodSources, Dialects]) -> None:
        if wanted == self.settings:
            return
        before, (settings, self._configured_dialects) = self._settings, wanted
        self._settings, refresh = settings, settings.refresh
        self._dialects = self._configured_dialects.with_attributes(refresh.attributes)
        self.budget.shortest, self.budget.max_core = refresh.interval, refresh.max_core
        for refresher, _ in self._loops.values():
            refresher.settings, refresher.dialects = refresh, self._dialects
        if any(getattr(before, key) != getattr(settings, key) for key in ("file", "dns", "kubernetes")):
            self._discover_by(self._sources(settings))
        self._reconcile(STATIC, settings.static)

    @property
    def sources(self) -> Set[str]:
        """The names under which this runner adds and removes pods."""
        return {STATIC, *self._polled}

    def refresher_of(self, endpoint: Endpoint) -> Refresher | None:
        """Return None for an endpoint that is not of this runner."""
        found = self._loops.get(endpoint.first_rank)
        return found[0] if found else None

    async def first_contact(self, timeout: float) -> bool:
        """Wait until discovery has run once and each pod found by then was scraped once, whatever the result. Return
        False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                for polled in self._polled.values():
                    await polled.wait()
                while untried := [refresher for refresher, _ in self._loops.values() if not refresher.tried.is_set()]:
                    await untried[0].tried.wait()
        except TimeoutError:
            return False
        return True

    def _added(self, endpoint: Endpoint) -> None:
        if endpoint is not endpoint.first_rank:
            return
        refresher = Refresher(
            endpoint,
            self._fleet,
            self._fetcher,
            self._settings.refresh,
            self._dialects,
            self.budget,
            self._clock,
            self._rng,
            self.scraped,
        )
        now = self._clock.now()
        delay = max(self._next_start - now, 0.0)
        self._next_start = now + delay + FIRST_GAP
        task = self._tasks.keep(partial(refresher.run, delay), "refresh", endpoint.name)
        self._loops[endpoint] = (refresher, task)

    def _removed(self, endpoint: Endpoint) -> None:
        if endpoint not in self._loops:
            return
        refresher, task = self._loops.pop(endpoint)
        task.cancel()
        refresher.tried.set()

    def _discover_by(self, sources: Sequence[Source]) -> None:
        """Use these sources from here on. Pods of others leave."""
        for search in self._searches:
            search.cancel()
        for name in self._polled.keys() - {source.name for source in sources}:
            self._reconcile(name, ())
        self._polled = {source.name: asyncio.Event() for source in sources}
        self._searches = [
            self._tasks.keep(partial(self._discover, source), "discovery", source.name) for source in sources
        ]

    async def _discover(self, source: Source) -> None:
        async with source:
            while True:
                pods = await source.poll()
                if pods is not None:
                    self._reconcile(source.name, pods)
                self._polled[source.name].set()
                await asyncio.sleep(source.interval if self._loops else min(source.interval, FIRST_POD_INTERVAL))

    def _reconcile(self, source: str, pods: Sequence[PodSettings]) -> None:
        self._fleet.reconcile(named(source, self.pool), pods, self.pool)

    def _sources(self, settings: PodSources) -> list[Source]:
        """Return the sources of the configuration. Only these are imported."""
        sources: list[Source] = []
        if settings.file is not None:
            from proxy.fleet.discovery.file import FileSource

            sources.append(FileSource(settings.file))
        if settings.dns is not None:
            from proxy.fleet.discovery.dns import DnsSource

            sources.append(DnsSource(settings.dns))
        if settings.kubernetes is not None:
            from proxy.fleet.discovery.kubernetes import KubernetesSource

            sources.append(KubernetesSource(settings.kubernetes, self._clock, self._rng))
        return sources

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            self._fleet.sweep()
