"""Which decisions are kept, and who may ask on what they rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.core.endpoint import Endpoint
from proxy.core.errors import NotFound
from proxy.core.ports import Clock, Random
from proxy.explain.explained import Chosen, Explained, MayAsk, Notes
from proxy.explain.kept import Kept
from proxy.explain.table import whole
from proxy.explain.wanted import Wanted
from proxy.fleet.store import Fleet
from proxy.scheduling.build import Scheduling
from proxy.telemetry.settings import DecisionSettings

OFF: Mapping[str, Any] = {
    "on": False,
    "hint": "Decisions are not kept. To keep them: `telemetry: {decisions: {}}` in the configuration, and a reload.",
    "decisions": [],
}


class Explaining:
    """`kept` is None while decisions are not kept: then nothing of this is on the way of a request."""

    def __init__(self, fleet: Fleet, clock: Clock, rng: Random, may_ask: MayAsk, prefix: str = "") -> None:
        """`prefix`: see `Kept`."""
        self.kept: Kept | None = None
        self._fleet = fleet
        self._clock = clock
        self._random = rng
        self._may_ask = may_ask
        self._prefix = prefix

    def listener(self, schedulings: Mapping[str, Scheduling], kept: Kept) -> Explained:
        """Return what keeps the decisions of these, by pool."""
        alone = len(schedulings) == 1
        notes = {name: self.notes(scheduling, name, alone) for name, scheduling in schedulings.items()}
        return Explained(notes, kept, Chosen(self._random, kept, self._may_ask))

    def notes(self, scheduling: Scheduling, pool: str, alone: bool) -> Notes:
        """`alone`: there is no other pool."""
        return Notes(scheduling, pool, self._pods(pool, alone), self._clock)

    def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises BadRequest."""
        wanted, kept = Wanted.of(query), self.kept
        if kept is None:
            return OFF
        settings = kept.settings
        return {
            "on": True,
            "keep": settings.keep,
            "sample": settings.sample,
            "slow": settings.slow,
            "kept": len(kept),
            "bytes": kept.bytes,
            "seen": kept.seen,
            "decisions": wanted.among(kept, self._clock.now()),
        }

    def shown(self, name: str) -> Mapping[str, Any]:
        """By its id, or by that of the request. Raises NotFound."""
        if self.kept is None:
            raise NotFound(OFF["hint"])
        entry = self.kept.find(name)
        if entry is None:
            raise NotFound(f"No decision '{name}' is kept: it has gone, was not sampled, or never came to be.")
        return whole(entry)

    def make_kept(self, settings: DecisionSettings) -> Kept:
        return Kept(settings, self._clock, self._prefix)

    def _pods(self, pool: str, alone: bool) -> Callable[[], Sequence[Endpoint]]:
        if alone:
            return lambda: self._fleet.endpoints
        return lambda: [endpoint for endpoint in self._fleet.endpoints if endpoint.pool == pool]
