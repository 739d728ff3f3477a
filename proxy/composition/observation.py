"""Telemetry of a process: metrics, access log, traces and the record of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy import __version__
from proxy.composition.indexes import exact_indexes, predictors
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Problem
from proxy.core.ports import Clock
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.fleet.store import Fleet
from proxy.plugins.producers.session_id import SESSION_ID
from proxy.plugins.session_affinity import ID_HEADER
from proxy.prefix.index import PrefixIndex
from proxy.scheduling.build import Scheduling
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.exposition import Exposition
from proxy.telemetry.instruments import Counter
from proxy.telemetry.observer import Observer
from proxy.telemetry.recorder import Recorder
from proxy.telemetry.settings import RecordSettings, Telemetry, TracingSettings

if TYPE_CHECKING:
    from proxy.telemetry.span_queue import SpanQueue
    from proxy.telemetry.tracing import Tracing

TRACES_PATH = "/v1/traces"

TRACES_TIMEOUT = 5.0
"""Seconds for the collector to accept one batch of spans; then the batch is dropped and counted."""


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
        self.endpoints = EndpointSeries(catalogue, fleet, (), clock, doubts=fleet.ejection_reasons, breaker=breaker)
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
        return Recorder(settings, self._clock, self.catalogue.record_lines_lost.cell(), self._adapters, _session)

    def _adapters(self) -> frozenset[str]:
        return frozenset(card["id"] for card in self._fleet.models() if card.get("parent"))


def _session(request: InferenceRequest) -> str:
    """Return the session that the producer found or the client's header names; "" without one."""
    return request.state.read(SESSION_ID) or request.headers.get(ID_HEADER, "").strip()


def traces_of(settings: TracingSettings | None, clock: Clock, lost: Callable[[], Counter]) -> Traces | None:
    """None where nothing is traced. Raises ConfigError if the extra is missing."""
    if settings is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from proxy.telemetry.span_queue import SpanQueue
        from proxy.telemetry.tracing import Tracing
    except ImportError:
        raise ConfigError([Problem("telemetry.tracing", "needs the extra: pip install 'kvlane[otel]'")]) from None
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # the queue says once what it says again
    exporter = OTLPSpanExporter(
        target(settings.endpoint), headers=dict(settings.collector_headers), timeout=TRACES_TIMEOUT
    )
    queue = SpanQueue(exporter, lost())
    return Traces(Tracing(settings, __version__, clock, queue), queue)


def target(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


@dataclass(frozen=True, slots=True)
class Traces:
    """The listener that makes spans, and the queue that sends them."""

    tracing: Tracing
    queue: SpanQueue

    async def begin(self, stack: AsyncExitStack) -> None:
        """What has ended is sent from here on, and the last of it when the stack ends."""
        await stack.enter_async_context(self.queue)
