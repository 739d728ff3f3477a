"""What the workers of a host know of the roles of its pools, added up: read off what they show of themselves."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from proxy.autoscale.measures import Known
from proxy.autoscale.quantile import Buckets
from proxy.autoscale.recent import Recent
from proxy.settings import Settings
from proxy.telemetry.catalogue import Catalogue

_TTFT, _BACKLOG, _QUEUE = (
    "kvlane_autoscale_time_to_first_token_seconds_bucket",
    "kvlane_autoscale_prefill_backlog_seconds",
    "kvlane_queue_requests",
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Role = tuple[str, str]
"""Pool and role."""


@dataclass(slots=True)
class Shown:
    """By all workers together."""

    queued: dict[str, int] = field(default_factory=dict)
    """By pool."""
    backlogs: dict[Role, float] = field(default_factory=dict)
    buckets: dict[Role, dict[float, float]] = field(default_factory=dict)

    def ttfts(self, role: Role) -> Buckets:
        return sorted(self.buckets.get(role, {}).items())


def shown(expositions: Iterable[bytes]) -> Shown:
    found = Shown()
    for line in (line for one in expositions for line in one.decode().splitlines()):
        if line.startswith((_TTFT, _BACKLOG, _QUEUE)):
            series, _, value = line.rpartition(" ")
            name, _, rest = series.partition("{")
            _take(found, name, dict(_LABEL.findall(rest)), float(value))
    return found


def _take(found: Shown, name: str, labels: Mapping[str, str], value: float) -> None:
    pool, role = labels.get("pool", ""), (labels.get("pool", ""), labels.get("role", ""))
    if name == _QUEUE:
        found.queued[pool] = found.queued.get(pool, 0) + int(value)
    elif name == _BACKLOG:
        found.backlogs[role] = found.backlogs.get(role, 0.0) + value
    elif name == _TTFT:
        buckets = found.buckets.setdefault(role, {})
        bound = float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value


class WorkersSenses:
    """Senses of the autoscaler. `ask` gives what every worker shows."""

    def __init__(self, settings: Settings, catalogue: Catalogue, ask: Callable[[], Awaitable[Iterable[bytes]]]) -> None:
        self._catalogue = catalogue
        self._ask = ask
        self._shown = Shown()
        self._recent: dict[Role, Recent] = {}
        self.change(settings)

    def change(self, settings: Settings) -> None:
        pools = settings.autoscale.pools
        self._roles = {(name, role.name) for name, pool in pools.items() for role in pool.roles}
        for gone in self._recent.keys() - self._roles:
            del self._recent[gone]

    async def look(self) -> None:
        self._shown = shown(await self._ask())

    def known(self, pool: str, role: str, now: float) -> Known:
        found, key = self._shown, (pool, role)
        ttft = self._recent.setdefault(key, Recent()).look(now, found.ttfts(key))
        return Known(found.queued.get(pool, 0), found.backlogs.get(key), ttft)

    def read(self) -> None:
        """For an exposition."""
        gauge = self._catalogue.prefill_backlog
        gauge.clear()
        for role, backlog in self._shown.backlogs.items():
            if role in self._roles:
                gauge.cell(*role).value = backlog
