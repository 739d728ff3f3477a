"""Series with the lifetime of a pod: counted per endpoint object, and read from the fleet for every exposition."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.core.endpoint import NEVER_SCRAPED, Endpoint, EndpointState
from proxy.core.ports import Clock
from proxy.telemetry.metrics import OTHER, Catalogue

if TYPE_CHECKING:
    from proxy.fleet.store import Fleet
    from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
    from proxy.prefix.exact import ExactIndex
    from proxy.prefix.index import PrefixIndex

PODS_AT_ONCE = 100
"""Number of pods that are read without a pause: about a millisecond."""


@dataclass(slots=True)
class EndpointCounts:
    """Counts of one pod since it was discovered."""

    decisions: int = 0
    scrape_failures: int = 0
    attempts: Counts[str] = field(default_factory=Counts)
    check_failures: Counts[str] = field(default_factory=Counts)
    transitions: Counts[str] = field(default_factory=Counts)


@dataclass(eq=False)
class EndpointSeries:
    """The series of pods. Pods beyond `limit` are added up as `other`, with the largest of their shares and ages.
    `breaker` returns the state of a pod's circuit breaker."""

    catalogue: Catalogue
    fleet: Fleet
    clock: Clock
    limit: int = 1000
    breaker: Callable[[Endpoint], str] = lambda endpoint: "closed"
    indexes: Sequence[PrefixIndex] = ()
    """The approximate indexes of the current configuration, as the next two."""
    exact: Sequence[ExactIndex] = ()
    predictors: Sequence[PredictedLatencyProducer] = ()
    _counts: dict[Endpoint, EndpointCounts] = field(init=False, default_factory=dict)
    _present: frozenset[Endpoint] = field(init=False, default=frozenset())

    def of(self, endpoint: Endpoint) -> EndpointCounts:
        return self._counts.get(endpoint) or self._add(endpoint)

    def moved(self, endpoint: Endpoint) -> None:
        """Count a change of a pod's state."""
        self.of(endpoint).transitions[endpoint.state.value] += 1

    def scrape_failed(self, endpoint: Endpoint) -> None:
        """Count a failed scrape of a pod."""
        self.of(endpoint).scrape_failures += 1

    def check_failed(self, endpoint: Endpoint, kind: str) -> None:
        """Count a failed health check of this kind."""
        self.of(endpoint).check_failures[kind] += 1

    async def read(self) -> None:
        """Update the series of pods, pools and indexes. The event loop may run in between: one read at a time."""
        c, endpoints, now = self.catalogue, self.fleet.endpoints, self.clock.now()
        counted = (c.decisions, c.attempts, c.scrape_failures, c.transitions, c.check_failures)
        loads = (c.in_flight, c.in_flight_tokens, c.waiting, c.running, c.kv_usage, c.scrape_age, c.index_error)
        for family in (*counted, *loads, c.state, c.breaker_state, c.ejection_reasons):
            family.clear()
        for family in (c.pool_ready, c.pool_waiting, c.pool_kv_usage):
            family.clear()
        for position, endpoint in enumerate(endpoints):
            if position % PODS_AT_ONCE == PODS_AT_ONCE - 1:
                await asyncio.sleep(0)
            label = endpoint.name if position < self.limit else OTHER
            self._read_state(label, endpoint, now)
            self._read_counts(label, self._counts.get(endpoint) or EndpointCounts())
        self._read_pools([endpoint for endpoint in endpoints if endpoint.state is EndpointState.READY])
        if self.predictors:
            c.prediction_error.cell().value = max(one.error for one in self.predictors)
        indexes: list[PrefixIndex | ExactIndex] = [*self.indexes, *self.exact]
        c.index_pairs.cell().value = sum(index.pairs for index in indexes)
        c.index_bytes.cell().value = sum(index.bytes for index in indexes)

    def _add(self, endpoint: Endpoint) -> EndpointCounts:
        """Add the counts of a pod, and drop the counts of removed pods. Attempts of a removed pod are not shown."""
        if endpoint not in self._present:
            self._present = present = frozenset(self.fleet.endpoints)
            self._counts = {known: counts for known, counts in self._counts.items() if known in present}
        counts = EndpointCounts()
        if endpoint in self._present:
            self._counts[endpoint] = counts
        return counts

    def _read_state(self, label: str, endpoint: Endpoint, now: float) -> None:
        c, metrics = self.catalogue, endpoint.metrics
        c.in_flight.cell(label).value += endpoint.load.requests
        c.in_flight_tokens.cell(label).value += endpoint.load.tokens
        c.state.cell(label, endpoint.state.value).value += 1
        c.breaker_state.cell(label, self.breaker(endpoint)).value += 1
        for reason in self.fleet.ejection_reasons(endpoint):
            c.ejection_reasons.cell(label, reason).value += 1
        for estimate in self.indexes:
            error = c.index_error.cell(label)
            error.value = max(error.value, estimate.prediction_error(endpoint))
        if metrics is NEVER_SCRAPED:
            return
        c.waiting.cell(label).value += metrics.waiting
        c.running.cell(label).value += metrics.running
        for family, value in ((c.kv_usage, metrics.kv_usage), (c.scrape_age, now - metrics.scraped_at)):
            cell = family.cell(label)
            cell.value = max(cell.value, value)

    def _read_counts(self, label: str, counts: EndpointCounts) -> None:
        c = self.catalogue
        c.decisions.cell(label).add(counts.decisions)
        c.scrape_failures.cell(label).add(counts.scrape_failures)
        by_kind = ((c.attempts, counts.attempts), (c.transitions, counts.transitions))
        for family, numbers in (*by_kind, (c.check_failures, counts.check_failures)):
            for kind, number in numbers.items():
                family.cell(label, kind).add(number)

    def _read_pools(self, ready: Collection[Endpoint]) -> None:
        for pool in self.fleet.pools:
            mine = [endpoint for endpoint in ready if endpoint.pool == pool]
            views = [endpoint.view for endpoint in mine]
            share = 1 / len(views) if views else 0.0
            self.catalogue.pool_ready.cell(pool).value = sum(endpoint is endpoint.first_rank for endpoint in mine)
            self.catalogue.pool_waiting.cell(pool).value = share * sum(view.waiting for view in views)
            self.catalogue.pool_kv_usage.cell(pool).value = share * sum(view.kv_usage for view in views)
