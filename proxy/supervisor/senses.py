"""What the workers of a host know of the roles of its pools, added up: read off what they show of themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from proxy.autoscale.measures import Known
from proxy.autoscale.quantile import Buckets
from proxy.autoscale.recent import ScaledPools
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.prometheus_text import Sample, SampleReader, sums_by

_TTFT, _BACKLOG, _QUEUE = (
    "kvlane_autoscale_time_to_first_token_seconds_bucket",
    "kvlane_autoscale_prefill_backlog_seconds",
    "kvlane_queue_requests",
)
_READER = SampleReader((_TTFT, _BACKLOG, _QUEUE))

Role = tuple[str, str]
"""Pool and role."""


class Shown:
    """The sums over the expositions of all workers."""

    def __init__(self, expositions: Iterable[bytes] = ()) -> None:
        samples: dict[str, list[Sample]] = {}
        for exposition in expositions:
            for name, found in _READER.read(exposition).items():
                samples.setdefault(name, []).extend(found)
        queued = sums_by(samples.get(_QUEUE, ()), ("pool",))
        backlogs = sums_by(samples.get(_BACKLOG, ()), ("pool", "role"))
        self.queued = {pool: int(number) for (pool,), number in queued.items()}
        """Waiting requests by pool."""
        self.backlogs: dict[Role, float] = {(pool, role): seconds for (pool, role), seconds in backlogs.items()}
        self._buckets: dict[Role, list[tuple[float, float]]] = {}
        for (pool, role, bound), count in sums_by(samples.get(_TTFT, ()), ("pool", "role", "le")).items():
            self._buckets.setdefault((pool, role), []).append((float(bound), count))

    def ttfts(self, role: Role) -> Buckets:
        return sorted(self._buckets.get(role, ()))


class WorkersSenses(ScaledPools):
    """Senses of the autoscaler. `ask` gives what every worker shows."""

    def __init__(self, catalogue: Catalogue, ask: Callable[[], Awaitable[Iterable[bytes]]]) -> None:
        super().__init__()
        self._catalogue = catalogue
        self._ask = ask
        self._shown = Shown()

    async def look(self) -> None:
        self._shown = Shown(await self._ask())

    def known(self, pool: str, role: str, now: float) -> Known:
        found, key = self._shown, (pool, role)
        ttft = self.recent(pool, role, now, found.ttfts(key))
        return Known(found.queued.get(pool, 0), found.backlogs.get(key), ttft)

    def read(self) -> None:
        """For an exposition."""
        gauge = self._catalogue.prefill_backlog
        gauge.clear()
        for role, backlog in self._shown.backlogs.items():
            if role in self.roles:
                gauge.cell(*role).value = backlog
