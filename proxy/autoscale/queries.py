"""What metrics and signals are read from, where that is a query: asked before every decision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from proxy.autoscale.observed import Sample
from proxy.autoscale.settings import PoolSettings
from proxy.autoscale.sources import PROMQL
from proxy.core.ports import Clock

log = logging.getLogger(__name__)


class Unanswered(Exception):
    """Why there is no value."""


Ask = Callable[[str], Awaitable[float]]
"""The value of a query; raises Unanswered."""


@dataclass(slots=True)
class Queries:
    """Of one pool. `answers` are by source, each of its own moment: one that is not renewed grows old."""

    ask: Ask
    clock: Clock
    answers: dict[str, Sample] = field(default_factory=dict)
    _failing: set[str] = field(default_factory=set)

    async def look(self, pool: PoolSettings) -> None:
        sources = set(_sources(pool))
        for gone in self.answers.keys() - sources:
            del self.answers[gone]
        await asyncio.gather(*(self._look(source) for source in sources))

    async def _look(self, source: str) -> None:
        """A failure is said once, until it ends."""
        query = source.removeprefix(PROMQL).strip()
        try:
            self.answers[source] = Sample(await self.ask(query), self.clock.now())
            self._failing.discard(source)
        except Unanswered as why:
            if source not in self._failing:
                log.warning("autoscale: the query %r has no value: %s", query, why)
            self._failing.add(source)


def _sources(pool: PoolSettings) -> Iterator[str]:
    yield from _queried(one.source for one in pool.metrics)
    for role in pool.roles:
        yield from _queried(one.source for one in role.metrics)
    for signals in pool.coordination.signals.values():
        yield from _queried(one.source for one in signals.values())


def _queried(sources: Iterable[str]) -> Iterator[str]:
    return (source for source in sources if source.startswith(PROMQL))
