"""The catalogue as Prometheus reads it, rendered in slices between which the event loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from proxy.telemetry import standard_error
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.observer import Observer

_END = b"# EOF\n"


class Exposition:
    """What /metrics answers with; the requests of the `observer`, if there is one, are counted to the last. `readers`
    bring further gauges up to date."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        observer: Observer | None = None,
        readers: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._readers = readers
        self._catalogue = catalogue
        self._endpoints = endpoints
        self._observer = observer
        self._one_at_a_time = asyncio.Lock()

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type: OpenMetrics for those who accept it, else the text format."""
        async with self._one_at_a_time:
            if self._observer is not None:
                await self._observer.settle()
            await self._endpoints.read()
            self._catalogue.stderr_lines_lost.cell().value = standard_error.lost_lines()
            for read in self._readers:
                read()
            return await expose(self._catalogue, accept)


async def expose(catalogue: Catalogue, accept: str) -> tuple[bytes, str]:
    """As `Exposition.render`, of what was read last."""
    encode, content_type = _encoder(accept)
    parts: list[bytes] = []
    previous = ""
    for metric in catalogue.slices():
        text = encode(_Slice(metric)).removesuffix(_END)
        parts.append(_without_head(text) if metric.name == previous else text)
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


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # the version in the header is none
        return generate_latest, CONTENT_TYPE_PLAIN_0_0_4


def _without_head(text: bytes) -> bytes:
    """A family has one head, also when it comes in several slices."""
    while text.startswith(b"#"):
        _, _, text = text.partition(b"\n")
    return text
