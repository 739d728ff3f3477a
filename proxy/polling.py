"""Discovery, scrapes, model lists and health checks of the pods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.state import Draft
from proxy.core.tasks import Tasks
from proxy.fleet.models import ModelRounds
from proxy.fleet.refresh import Refresher, Scraped
from proxy.fleet.runner import STATIC, FleetRunner, named
from proxy.fleet.store import Fleet, FleetSettings
from proxy.http.settings import PodTlsContexts
from proxy.http.upstream.pool import PooledFetcher
from proxy.reliability.health import HealthChecks
from proxy.reliability.settings import HealthSettings
from proxy.settings import PoolSettings, Settings

FIRST_CONTACT = 5.0
"""Seconds in which each pod should have been contacted once."""

SCRAPES_PER_CHECK = 4
"""Smallest number of scrapes of a pod between two health checks, so that large fleets are checked less often."""


def fleet_settings(settings: Settings, is_polling: bool) -> FleetSettings:
    """`is_polling`: this process adds and removes the configured pods."""
    static, pools = {}, settings.all_pools
    for name, pool in pools.items() if is_polling else ():
        static[named(STATIC, name)] = frozenset(pod.name for pod in pool.pods.static)
    breaker = settings.reliability.breaker
    dialects = {name: pool.dialects for name, pool in pools.items()}
    return FleetSettings(
        tuple(pools), static, breaker.panic_percent, breaker.slow_start, settings.models.wake.enabled, dialects
    )


@dataclass(eq=False)
class Polling:
    """Polls the pods of a process. `runners`, by pool, belong to the configuration in use."""

    _fleet: Fleet
    _pod_tls: PodTlsContexts
    _clock: Clock
    _random: Random
    _check_failed: Callable[[Endpoint, str], None]
    """See HealthChecks."""

    def __post_init__(self) -> None:
        self.tasks = Tasks()
        """Runs the model reads."""
        self.runners: Mapping[str, FleetRunner] = {}
        self.scraped: Scraped = lambda *_: None
        """Called after every scrape."""
        self._rounds = ModelRounds(self._read_models, self._clock, self.tasks)

    def build(self, settings: Settings, draft: Draft) -> None:
        """Build the polling of a configuration, which starts with `State.finish_commit`."""
        runners = {name: self._runner(name, pool, draft) for name, pool in settings.all_pools.items()}
        self._build_checks(settings.reliability.health, draft)
        draft.assign(self, runners=runners)

    async def first_contact(self) -> None:
        """Wait until the pods are known well enough to serve requests."""
        await asyncio.gather(*(runner.first_contact(FIRST_CONTACT) for runner in self.runners.values()))

    def refresher_of(self, endpoint: Endpoint) -> Refresher | None:
        runner = self.runners.get(endpoint.pool)
        return runner.refresher_of(endpoint) if runner else None

    def next_round(self) -> asyncio.Future[None]:
        """See ModelReads, here and below."""
        return self._rounds.next()

    def read_soon(self, endpoint: Endpoint) -> None:
        self._read_models_of(endpoint)

    def _runner(self, name: str, pool: PoolSettings, draft: Draft) -> FleetRunner:
        timeout, clock = pool.pods.refresh.timeout, self._clock
        scraper = draft.get_and_assign(
            ("scraper", name), partial(PooledFetcher, timeout, clock, self._pod_tls), timeout=timeout
        )
        return draft.get_and_assign(
            ("runner", name),
            lambda: FleetRunner(
                self._fleet, pool.pods, scraper, clock, self._random, pool.dialects, name, lambda *of: self.scraped(*of)
            ),
            settings=(pool.pods, pool.dialects),
        )

    def _build_checks(self, settings: HealthSettings, draft: Draft) -> None:
        timeouts = [settings.timeout] if settings.inference is None else [settings.timeout, settings.inference.timeout]
        fleet, timeout = self._fleet, max(timeouts)
        fetcher = partial(PooledFetcher, timeout, self._clock, self._pod_tls)
        checker = draft.get_and_assign("health-connections", fetcher, timeout=timeout)
        draft.get(
            "health-checks",
            lambda: HealthChecks(
                settings, fleet.watch, fleet, checker, self._random, self._check_failed, self._shortest, self._refused
            ),
            settings,
        )

    def _read_models(self) -> list[asyncio.Future[None]]:
        reads = map(self._read_models_of, self._fleet.ready)
        return [read for read in reads if read is not None]

    def _read_models_of(self, endpoint: Endpoint) -> asyncio.Future[None] | None:
        refresher = self.refresher_of(endpoint)
        return refresher.read_models() if refresher else None

    def _shortest(self, endpoint: Endpoint) -> float:
        refresher = self.refresher_of(endpoint)
        return SCRAPES_PER_CHECK * refresher.interval if refresher else 0.0

    def _refused(self, endpoint: Endpoint) -> None:
        if refresher := self.refresher_of(endpoint):
            refresher.scrape_itself()
