"""What can be seen of the proxy from outside: its series, the access log, the record of requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack

from proxy.composition.indexes import exact_indexes, predictors
from proxy.composition.tracing import traces_of
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.fleet.datastore import Fleet
from proxy.prefix.index import PrefixIndex
from proxy.replay.recorder import Recorder
from proxy.scheduling.build import Scheduling
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.exposition import Exposition
from proxy.telemetry.observer import Observer
from proxy.telemetry.settings import RecordSettings, Telemetry


class Observation:
    """`readers` bring gauges up to date before they are shown."""

    def __init__(
        self,
        settings: Telemetry,
        catalogue: Catalogue,
        fleet: Fleet,
        clock: Clock,
        breaker: Callable[[Endpoint], str],
    ) -> None:
        """`breaker`: the state of a pod's. Raises ConfigError."""
        self._settings = settings
        self._fleet = fleet
        self._clock = clock
        self.catalogue = catalogue
        self.endpoints = EndpointSeries(catalogue, fleet, (), clock, doubts=fleet.doubts, breaker=breaker)
        self.readers: list[Callable[[], None]] = []
        self.traces = traces_of(settings.tracing, clock, catalogue.spans_lost.cell)
        self.observer = Observer(catalogue, self.endpoints, clock)
        self._recorder = None if settings.record is None else self._make_recorder(settings.record)
        tracing = None if self.traces is None else self.traces.tracing
        self.listeners = [each for each in (self.observer, tracing, self._recorder) if each is not None]
        """Metrics, and what else is told of all requests."""
        self.exposition = Exposition(catalogue, self.endpoints, self.observer, self.readers)

    def show(self, schedulings: Collection[Scheduling], indexes: Sequence[PrefixIndex]) -> None:
        """Have the series tell what these know."""
        exact = [index for scheduling in schedulings for index in exact_indexes(scheduling)]
        self.endpoints.indexes = [*indexes, *exact]
        self.endpoints.predictors = [one for scheduling in schedulings for one in predictors(scheduling)]
        self.endpoints.estimates = indexes

    async def begin(self, stack: AsyncExitStack, tasks: Tasks, write: Callable[[], Callable[[bytes], int]]) -> None:
        """`write` makes what writes the access log, where one is wanted."""
        if self.traces is not None:
            await self.traces.begin(stack)
        if self._settings.access_log:
            access_log = AccessLog(write(), self._clock, self.catalogue.log_lines_lost.cell())
            self.observer.access_log = await stack.enter_async_context(access_log)
        stack.callback(self.observer.flush)
        tasks.keep(self.observer.run, "metrics-and-access-log")
        if self._recorder is not None:
            await stack.enter_async_context(self._recorder)

    def _make_recorder(self, settings: RecordSettings) -> Recorder:
        return Recorder(settings, self._clock, self.catalogue.record_lines_lost.cell(), self._adapters)

    def _adapters(self) -> frozenset[str]:
        return frozenset(card["id"] for card in self._fleet.models() if card.get("parent"))
