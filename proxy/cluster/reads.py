"""What the supervisor reads from its workers: metrics, decisions, and signals for the autoscaler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from proxy.autoscale.signals import Signals, SignalSource
from proxy.cluster.questions import QuestionFailed
from proxy.cluster.workers import Workers
from proxy.core.errors import NoEndpoints
from proxy.dashboard.samples import Series
from proxy.scheduling.explained_log import DecisionQuery
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import SUPERVISOR, Catalogue, Merged
from proxy.telemetry.observation import Exposition, expose

METRICS_TIMEOUT = 2.0
"""Seconds to wait for the metrics, or the signals, of one worker."""

DECISIONS_TIMEOUT = 5.0
"""Seconds to wait for the decisions of one worker."""

METRICS, SIGNALS, LISTED, SHOWN, IMAGINED = "metrics", "signals", "listed", "shown", "imagined"
"""Topics of the questions."""


class HostExposition(Exposition):
    """The metrics of a host: the sums over its workers and the supervisor.

    A worker without a reply counts with its last reply. What workers counted that have ended stays in the sums:
    otherwise these would fall, and rates be wrong."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        workers: Workers,
        readers: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(catalogue, endpoints, readers=readers)
        self._workers = workers
        self._merging = asyncio.Lock()

    async def render(self, accept: str) -> tuple[bytes, str]:
        async with self._merging:
            merged = await self._merged()
            self.catalogue.workers.cell().value = self._workers.number_serving
            await merged.add(await self.dump(), SUPERVISOR)
            return await expose(merged, accept)

    async def counted(self) -> Series:
        """Return the sums over workers, including workers that have ended, for the dashboard."""
        async with self._merging:
            return Series((await self._merged()).all_families)

    async def _merged(self) -> Merged:
        for worker, metrics in await self._workers.ask_all(METRICS, timeout=METRICS_TIMEOUT):
            worker.metrics = metrics
        merged = Merged(self.catalogue)
        children, ended = list(self._workers.children.values()), self._workers.ended
        for worker in children:  # one that ends meanwhile is not in `ended`
            await merged.add(worker.metrics, str(worker.seat))
        await merged.add(ended, SUPERVISOR)
        return merged


class WorkersDecisions:
    """The decisions of all workers, as `http.admin_config.Explained`. A worker without a reply is left out."""

    SUMMED = ("kept", "bytes", "seen")

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decisions that match a query. Raise BadRequest."""
        limit = DecisionQuery.of(query).limit
        all_shown = await self._ask(LISTED, dict(query))
        found = sorted((one for shown in all_shown for one in shown["decisions"]), key=lambda one: -float(one["at"]))
        sums = {name: sum(shown[name] for shown in all_shown) for name in self.SUMMED if name in all_shown[0]}
        return {**all_shown[0], **sums, "decisions": found[:limit]}

    async def shown(self, name: str) -> Mapping[str, Any]:
        """Return one decision. Raise NotFound."""
        return dict(max(await self._ask(SHOWN, name), key=lambda shown: float(shown["at"])))

    async def imagined(self, trial: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decision that one of the workers would make: all know the same pods and each other's load. Raise
        RequestError."""
        for worker in self._workers.seated:
            with suppress(QuestionFailed):
                return dict(await self._workers.ask(worker, IMAGINED, trial, dict(query), timeout=DECISIONS_TIMEOUT))
        raise NoEndpoints("No worker responds.")

    async def _ask(self, topic: str, argument: Any) -> list[Any]:
        replies = await self._workers.ask_all(topic, argument, timeout=DECISIONS_TIMEOUT)
        if not replies:
            raise NoEndpoints("No worker responds.")
        return [reply for _, reply in replies]


class WorkerSignals(SignalSource):
    """The signals of all workers, added up. A worker without a reply counts with its last reply."""

    def __init__(self, catalogue: Catalogue, workers: Workers) -> None:
        super().__init__(catalogue)
        self._workers = workers

    async def update(self) -> None:
        for worker, reply in await self._workers.ask_all(SIGNALS, timeout=METRICS_TIMEOUT):
            worker.signals = Signals.read(reply)
        self.signals = Signals.sum(worker.signals for worker in self._workers.children.values())
