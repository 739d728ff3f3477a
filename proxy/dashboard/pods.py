"""What the fleet map shows of each pod, told when it has changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from proxy.core.attempt import Ending
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.ports import Clock
from proxy.fleet.store import Fleet

PODS_AT_ONCE = 50
"""Read without a pause: half a millisecond."""

FIELDS = (
    *("pool", "role", "state", "breaker", "doubts", "requests", "tokens", "waiting", "running", "kv"),
    *("scrapedAt", "stale", "leaving", "weight", "prefill", "perToken", "sent", "failed"),
)
"""Of a row, in their order. `scrapedAt` is in whole seconds since the Unix epoch, null before the first scrape.
`prefill` are the seconds that a typical prompt takes there, and `perToken` a token of an answer, as far as they are
learnt; `sent` and `failed` are legs since the start."""

FINE = (Ending.COMPLETE.value, Ending.CLIENT_GONE.value)

Row = list[Any]


class Counts(Protocol):
    """`telemetry.endpoints.EndpointCounts` is one."""

    @property
    def attempts(self) -> dict[str, int]:
        """By how they ended."""


Paces = Callable[[Endpoint], tuple[float, float] | None]


@dataclass(slots=True)
class PodRows:
    """Lives as long as the dashboard. `paces` gives what is learnt of pods: their `prefill` and `perToken`."""

    fleet: Fleet
    clock: Clock
    breaker: Callable[[Endpoint], str]
    counts: Callable[[Endpoint], Counts]
    paces: Callable[[], Paces]
    rows: dict[str, bytes] = field(init=False, default_factory=dict)
    """In JSON, by the name of the pod, as they were told last."""

    async def changes(self) -> dict[str, bytes | None]:
        """Rows that are not as they were; None for pods that are gone. Lets the event loop run in between."""
        found: dict[str, bytes | None] = {}
        there, ahead, pace = self.fleet.endpoints, self.clock.wall() - self.clock.now(), self.paces()
        for position, endpoint in enumerate(there):
            if position % PODS_AT_ONCE == PODS_AT_ONCE - 1:
                await asyncio.sleep(0)
            row = orjson.dumps(self._row(endpoint, ahead, pace(endpoint)))
            if self.rows.get(endpoint.name) != row:
                found[endpoint.name] = self.rows[endpoint.name] = row
        if len(self.rows) > len(there):
            for name in self.rows.keys() - {endpoint.name for endpoint in there}:
                del self.rows[name]
                found[name] = None
        return found

    def _row(self, endpoint: Endpoint, ahead: float, pace: tuple[float, float] | None) -> Row:
        """`ahead`: wall time less monotonic time."""
        metrics, view, load = endpoint.metrics, endpoint.view, endpoint.load
        never = math.isinf(metrics.scraped_at)
        prefill, per_token = pace or (None, None)
        attempts = self.counts(endpoint).attempts
        sent = sum(attempts.values())
        return [
            *(endpoint.pool, endpoint.role, endpoint.state.value, self.breaker(endpoint)),
            *(self.fleet.ejection_reasons(endpoint), load.requests, load.tokens),
            *(view.waiting, view.running, round(view.kv_usage, 3)),
            None if never else round(metrics.scraped_at + ahead),
            metrics.freshness is Freshness.STALE,
            self.fleet.is_leaving(endpoint),
            endpoint.weight,
            None if prefill is None else round(prefill, 3),
            None if per_token is None else round(per_token, 5),
            sent,
            sent - sum(attempts.get(ending, 0) for ending in FINE),
        ]
