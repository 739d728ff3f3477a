"""Traces, where `telemetry.tracing` is configured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy import __version__
from proxy.core.errors import ConfigError, Problem
from proxy.core.ports import Clock
from proxy.telemetry.instruments import Counter
from proxy.telemetry.settings import TracingSettings

if TYPE_CHECKING:
    from proxy.telemetry.span_queue import SpanQueue
    from proxy.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

PATH = "/v1/traces"

TIMEOUT = 5.0
"""Seconds for the collector to accept one batch of spans; then the batch is dropped and counted."""


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
    exporter = OTLPSpanExporter(target(settings.endpoint), headers=dict(settings.collector_headers), timeout=TIMEOUT)
    queue = SpanQueue(exporter, lost())
    return Traces(Tracing(settings, __version__, clock, queue), queue)


def target(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH


@dataclass(frozen=True, slots=True)
class Traces:
    """The listener that makes spans, and the queue that sends them."""

    tracing: Tracing
    queue: SpanQueue

    async def begin(self, stack: AsyncExitStack) -> None:
        """What has ended is sent from here on, and the last of it when the stack ends."""
        await stack.enter_async_context(self.queue)
