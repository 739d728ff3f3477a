"""Who tells the traces of decisions, legs and ends, where `telemetry.tracing` says that there are any."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy import __version__
from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Problem, Reason
from proxy.core.plugin import PostResponse, PreRequest
from proxy.core.ports import Call, Clock
from proxy.core.request import InferenceRequest
from proxy.replay.recorder import OnEnd
from proxy.scheduling.build import Scheduling
from proxy.scheduling.scheduler import Schedules
from proxy.telemetry.instruments import Counter
from proxy.telemetry.settings import TracingSettings

if TYPE_CHECKING:
    from proxy.telemetry.span_queue import SpanQueue
    from proxy.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

PATH = "/v1/traces"


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
        target(settings.endpoint), headers=dict(settings.collector_headers), timeout=settings.timeout
    )
    queue = SpanQueue(exporter, lost())
    return Traces(Tracing(settings, __version__, clock, queue), queue, clock)


def target(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH


@dataclass(slots=True)
class Traces:
    """What goes wrong here costs spans, and never a request."""

    tracing: Tracing
    queue: SpanQueue
    clock: Clock
    _has_failed: bool = field(init=False, default=False)

    async def begin(self, stack: AsyncExitStack) -> None:
        """What has ended is sent from here on, and the last of it when the stack ends."""
        await stack.enter_async_context(self.queue)

    def around(self, scheduling: Scheduling) -> Scheduling:
        """The same, but that its decisions and legs are traced."""
        hooks = (LegTraces(self.tracing),)
        return replace(
            scheduling,
            scheduler=TracedScheduler(scheduling.scheduler, self),
            pre_request_rounds=map(add, scheduling.pre_request_rounds, repeat(hooks)),
            post_response_rounds=map(add, scheduling.post_response_rounds, repeat(hooks)),
        )

    def before(self, then: OnEnd) -> OnEnd:
        """Who is told that a request has ended."""

        def ended(
            call: Call, status: int, outcome: Ending | Reason, attempt: Attempt | None = None, sent: int = 0
        ) -> None:
            try:
                self.tracing.request_ended(call, status, outcome, attempt)
            except Exception:
                if self.is_first_failure():
                    log.exception("request %s: it is not traced; further ones are not named", call.id)
            then(call, status, outcome, attempt, sent)

        return ended

    def is_first_failure(self) -> bool:
        had_failed, self._has_failed = self._has_failed, True
        return not had_failed


@dataclass(frozen=True, slots=True)
class TracedScheduler:
    """Stands in the place of a scheduling's scheduler."""

    inner: Schedules
    traces: Traces

    def schedule(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> Decision:
        """Raises RequestError."""
        started = self.traces.clock.now()
        decision = self.inner.schedule(request, endpoints, attempt)
        try:
            self.traces.tracing.decided(request, len(endpoints), decision, started)
        except Exception:
            if self.traces.is_first_failure():
                log.exception("request %s: its decision is not traced; further ones are not named", request.id)
        return decision


@dataclass(frozen=True, slots=True)
class LegTraces(PreRequest, PostResponse):
    tracing: Tracing
    plugin_type = "tracing"

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        self.tracing.leg_began(attempt)

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        self.tracing.leg_ended(attempt)
