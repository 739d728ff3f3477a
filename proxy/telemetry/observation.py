"""Telemetry of a process: metrics, access log, traces and the record of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from proxy import __version__
from proxy.core.endpoint import Endpoint
from proxy.core.errors import without_extra
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.fleet.store import Fleet
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.lines import lost_lines
from proxy.telemetry.metrics import Catalogue, Dump, Merged, dump_of, slices_of
from proxy.telemetry.observer import Observer
from proxy.telemetry.settings import Telemetry

if TYPE_CHECKING:
    from proxy.telemetry.recorder import RequestRecorder
    from proxy.telemetry.traces import Tracing


class Observation:
    """Telemetry of a process. `readers` update gauges before an exposition."""

    def __init__(
        self,
        settings: Telemetry,
        catalogue: Catalogue,
        fleet: Fleet,
        clock: Clock,
        breaker: Callable[[Endpoint], str],
    ) -> None:
        """`breaker` returns the state of a pod's circuit breaker. Raise ConfigError."""
        self._settings = settings
        self._clock = clock
        self.catalogue = catalogue
        self.endpoints = EndpointSeries(catalogue, fleet, clock, breaker=breaker)
        self.readers: list[Callable[[], None]] = []
        self.observer = Observer(catalogue, self.endpoints, clock)
        self._tracing: Tracing | None = None
        if settings.tracing is not None:
            try:
                from proxy.telemetry.traces import Tracing
            except ImportError:
                raise without_extra("telemetry.tracing", "otel") from None
            self._tracing = Tracing(settings.tracing, __version__, clock)
        self._recorder: RequestRecorder | None = None
        if settings.record is not None:
            from proxy.telemetry.recorder import RequestRecorder

            self._recorder = RequestRecorder(settings.record, clock, catalogue.record_lines_lost.cell(), fleet)
        self.listeners = [each for each in (self.observer, self._tracing, self._recorder) if each is not None]
        """Metrics, traces and the recorder: the listeners of all requests."""
        self.exposition = Exposition(catalogue, self.endpoints, self.observer, self.readers)

    async def start(self, stack: AsyncExitStack, tasks: Tasks, write: Callable[[], Callable[[bytes], int]]) -> None:
        """Start the telemetry. `write` creates the writer of the access log, if it is enabled."""
        if self._tracing is not None:
            self._tracing.start(stack, self.catalogue.spans_lost.cell())
        if self._settings.access_log:
            access_log = AccessLog(write(), self._clock, self.catalogue.access_log_lines_lost.cell())
            self.observer.access_log = await stack.enter_async_context(access_log)
        stack.callback(self.observer.flush)
        tasks.keep(self.observer.run, "metrics-and-access-log")
        if self._recorder is not None:
            await self._recorder.start(stack)


_END = b"# EOF\n"


@dataclass(eq=False)
class Exposition:
    """The response of /metrics. Before it, requests of the `observer` are counted, and `readers` update gauges."""

    catalogue: Catalogue
    endpoints: EndpointSeries
    observer: Observer | None = None
    readers: Sequence[Callable[[], None]] = ()
    _one_at_a_time: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return body and content type."""
        async with self._one_at_a_time:
            await self._read()
            return await expose(self.catalogue, accept)

    async def dump(self) -> Dump:
        async with self._one_at_a_time:
            await self._read()
            return dump_of(self.catalogue.all_families)

    async def _read(self) -> None:
        if self.observer is not None:
            await self.observer.flush_in_batches()
        await self.endpoints.read()
        self.catalogue.log_lines_lost.cell().value = lost_lines()
        for read in self.readers:
            read()
        await self.catalogue.read()


async def expose(families: Catalogue | Merged, accept: str) -> tuple[bytes, str]:
    """Return body and content type: OpenMetrics for clients that accept it, else the text format."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the header has no valid version
        encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
    parts: list[bytes] = []
    previous = ""
    for metric in slices_of(families.all_families):
        text = encode(_Slice(metric)).removesuffix(_END)
        while metric.name == previous and text.startswith(b"#"):  # a family in several slices has only one head
            _, _, text = text.partition(b"\n")
        parts.append(text)
        previous = metric.name
        await asyncio.sleep(0)
    if content_type.startswith("application/openmetrics-text"):
        parts.append(_END)
    return b"".join(parts), content_type


class _Slice(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
