"""What is done about pods that fail: breakers, signs of life, failover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import OutOfFiles, RequestError
from proxy.core.ports import Clock, Random
from proxy.core.request import InferenceRequest
from proxy.fleet.datastore import Fleet
from proxy.fleet.ledger import Ledger
from proxy.http.upstream.fetch import PooledFetcher
from proxy.http.upstream.trust import Trust
from proxy.reliability.breaker import Breakers, Company
from proxy.reliability.budget import RetryBudget
from proxy.reliability.failover import Alive, Failover, Narrow
from proxy.reliability.liveness import Liveness
from proxy.reliability.probe import generates
from proxy.reliability.settings import ReliabilitySettings

TOKEN_TIMEOUT = 5.0
"""Seconds for one token of an engine that stood still."""

Candidates = Callable[[InferenceRequest, Sequence[Endpoint]], Sequence[Endpoint]]
"""The pods that the scheduler would choose from these, of one pool, best first. Raises RequestError."""


class Reliability:
    """`company`: see Breakers."""

    def __init__(
        self, settings: ReliabilitySettings, fleet: Fleet, trust: Trust, clock: Clock, rng: Random, company: Company
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._trust = trust
        self._clock = clock
        self._random = rng
        self.breakers = Breakers(settings.breaker, clock, fleet, call_later, company)
        self.liveness = Liveness(settings.health.stall, clock, fleet, self._works)

    async def begin(self, stack: AsyncExitStack) -> None:
        self._asker = await stack.enter_async_context(PooledFetcher(TOKEN_TIMEOUT, self._clock, self._trust))
        await stack.enter_async_context(self.liveness)

    def make_failover(
        self, ledger: Ledger, alive: Alive, narrow: Narrow, candidates: Candidates, continued: Callable[[], object]
    ) -> Failover:
        """`continued`: see Failover."""
        retries = self._settings.retries

        def others(attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
            """Pods that the scheduler was not asked about, because they were not ready, or start slowly."""
            model, pool = attempt.request.model, attempt.endpoint.pool
            pods = [
                pod
                for pod in self._fleet.ready
                if pod.pool == pool and pod not in tried and (not pod.models or model in pod.models)
            ]
            try:
                return candidates(attempt.request, pods) if pods else ()
            except RequestError:
                return ()

        budget = RetryBudget(retries.budget_percent, self._clock, lambda: ledger.entered)
        return Failover(
            retries, self._clock, self._random, budget, alive, narrow=narrow, others=others, continued=continued
        )

    def change(self, settings: ReliabilitySettings) -> None:
        self._settings = settings
        self.breakers.change(settings.breaker)
        self.liveness.change(settings.health.stall)

    def forget(self, endpoint: Endpoint) -> None:
        self.breakers.forget(endpoint)
        self.liveness.forget(endpoint)

    async def _works(self, endpoint: Endpoint) -> bool | None:
        try:
            return await generates(endpoint, self._asker, TOKEN_TIMEOUT)
        except OutOfFiles:
            return None


def call_later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)
