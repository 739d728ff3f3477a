"""What can be seen of the proxy from outside: its series, the access log, the record of requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from proxy.composition.indexes import exact_indexes, predictors
from proxy.composition.tracing import traces_of
from proxy.core.endpoint import Endpoint
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.fleet.datastore import Fleet
from proxy.prefix.index import PrefixIndex
from proxy.replay.recorder import Recorder, key_path
from proxy.replay.salt import installation
from proxy.scheduling.build import Scheduling
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.exposition import Exposition
from proxy.telemetry.observer import Observer
from proxy.telemetry.settings import Telemetry


class Observation:
    """`readers` bring gauges up to date before they are shown."""

    observer: Observer
    exposition: Exposition
    """Both from `begin` on."""

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

    def follow(self, schedulings: Collection[Scheduling], indexes: Sequence[PrefixIndex]) -> None:
        """What these know is shown from here on."""
        exact = [index for scheduling in schedulings for index in exact_indexes(scheduling)]
        predicting = [predictor for scheduling in schedulings for predictor in predictors(scheduling)]
        self.endpoints.change([*indexes, *exact], predicting, indexes)

    async def begin(self, stack: AsyncExitStack, tasks: Tasks, write: Callable[[], Callable[[bytes], int]]) -> Observer:
        """`write` makes what writes the access log, where one is wanted."""
        catalogue, access_log = self.catalogue, None
        if self.traces is not None:
            await self.traces.begin(stack)
        if self._settings.access_log:
            access_log = AccessLog(write(), self._clock, catalogue.log_lines_lost.cell())
            await stack.enter_async_context(access_log)
        self.observer = Observer(catalogue, self.endpoints, self._clock, access_log)
        stack.callback(self.observer.flush)
        tasks.keep(self.observer.run, "metrics-and-access-log")
        self.exposition = Exposition(catalogue, self.endpoints, self.observer, self.readers)
        return self.observer

    async def listeners(self, stack: AsyncExitStack) -> list[Listener]:
        """Return those that are configured, running until the stack ends."""
        settings = self._settings.record
        listeners: list[Listener] = [self.observer]
        if self.traces is not None:
            listeners.append(self.traces.tracing)
        if settings is None:
            return listeners
        installed = installation(key_path(Path(settings.file)), self._clock.wall())
        lost = self.catalogue.record_lines_lost.cell()
        recorder = Recorder(settings, installed, self._clock, lost, self._adapters)
        await stack.enter_async_context(recorder)
        return [*listeners, recorder]

    def _adapters(self) -> frozenset[str]:
        return frozenset(card["id"] for card in self._fleet.models() if card.get("parent"))
