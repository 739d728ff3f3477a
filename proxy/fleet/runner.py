"""Starts and stops what keeps the fleet up to date: discovery, and one refresh loop per pod."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from types import TracebackType

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.budget import Budget
from proxy.fleet.datastore import Fleet
from proxy.fleet.dialects import Engines
from proxy.fleet.discovery.dns import DnsSource
from proxy.fleet.discovery.file import FileSource
from proxy.fleet.discovery.source import Source
from proxy.fleet.refresh import Fetcher, Refresher
from proxy.fleet.settings import FleetSettings

SWEEP_INTERVAL = 0.1

FIRST_GAP = 0.0005
"""Seconds between the first requests to pods that join together: at once, 500 of them hold up the loop for 0.1 s."""


class FleetRunner:
    """`async with FleetRunner(…)`: inside of it pods come, are asked, and go."""

    def __init__(
        self,
        fleet: Fleet,
        settings: FleetSettings,
        fetcher: Fetcher,
        clock: Clock,
        rng: Random,
        engines: Engines | None = None,
    ) -> None:
        refresh = settings.refresh
        self._fleet = fleet
        self._settings = settings
        self._fetcher = fetcher
        self._clock = clock
        self._rng = rng
        self._engines = (engines or Engines()).with_attributes(refresh.attributes)
        self._sources = _sources(settings)
        self._polled = {source.name: asyncio.Event() for source in self._sources}
        self._loops: dict[Endpoint, tuple[Refresher, asyncio.Task[None]]] = {}
        self._tasks = Tasks()
        self._next_start = 0.0
        self.budget = Budget(refresh.interval, refresh.max_core)

    async def __aenter__(self) -> FleetRunner:
        self._fleet.reconcile("static", self._settings.static)
        self._unwatch = self._fleet.watch(self._added, self._removed)
        for source in self._sources:
            self._tasks.start(self._discover(source), f"discovery by {source.name}")
        self._tasks.start(self._sweep(), "sweep of removed pods")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unwatch()
        await self._tasks.stop()

    @property
    def sources(self) -> Set[str]:
        """The names under which this runner adds and removes pods."""
        return {"static", *self._polled}

    async def first_contact(self, timeout: float) -> bool:
        """Waits until discovery has looked once and every pod there is by then has been tried once, whatever came of
        it. False if that takes longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                for polled in self._polled.values():
                    await polled.wait()
                for refresher, _ in list(self._loops.values()):
                    await refresher.tried.wait()
        except TimeoutError:
            return False
        return True

    def _added(self, endpoint: Endpoint) -> None:
        refresher = Refresher(
            endpoint,
            self._fleet,
            self._fetcher,
            self._settings.refresh,
            self._engines,
            self.budget,
            self._clock,
            self._rng,
        )
        now = self._clock.now()
        delay = max(self._next_start - now, 0.0)
        self._next_start = now + delay + FIRST_GAP
        task = self._tasks.start(refresher.run(delay), f"refresh of {endpoint.name}")
        self._loops[endpoint] = (refresher, task)

    def _removed(self, endpoint: Endpoint) -> None:
        refresher, task = self._loops.pop(endpoint)
        task.cancel()
        refresher.tried.set()

    async def _discover(self, source: Source) -> None:
        while True:
            pods = await source.poll()
            if pods is not None:
                self._fleet.reconcile(source.name, pods)
            self._polled[source.name].set()
            await asyncio.sleep(source.interval)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            self._fleet.sweep()


def _sources(settings: FleetSettings) -> list[Source]:
    sources: list[Source] = []
    if settings.file is not None:
        sources.append(FileSource(settings.file))
    if settings.dns is not None:
        sources.append(DnsSource(settings.dns))
    return sources
