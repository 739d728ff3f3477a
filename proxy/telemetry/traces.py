"""OpenTelemetry traces: a span per request and attempt."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision, DecisionRecord
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.listener import Listener
from proxy.core.ports import ClientRequest, Clock
from proxy.core.request import DataKey, InferenceRequest
from proxy.telemetry.metrics import Counter
from proxy.telemetry.observer import path_label
from proxy.telemetry.settings import TracingSettings

log = logging.getLogger(__name__)

INTERVAL = 1.0
BATCH = 512
MOST = 4096
"""Largest number of waiting spans, of about 2 KiB each."""

EXPORT_TIMEOUT = 5.0
"""Seconds for the collector to accept one batch."""

LAST_SECONDS = 5.0
"""Seconds for the collector to accept the remaining spans when the process stops."""

TRACES_PATH = "/v1/traces"


class SpanQueue(BatchSpanProcessor):
    """A queue that sends ended spans in batches. `lost` counts spans that meet a full queue and spans that the
    collector does not accept. Spans end on the event loop only."""

    def __init__(self, exporter: SpanExporter, lost: Counter, most: int = MOST) -> None:
        self._counting = _Counting(exporter, lost)
        self._most = most
        self._ended = 0
        super().__init__(self._counting, most + BATCH, INTERVAL * 1000, BATCH)

    def on_end(self, span: ReadableSpan) -> None:
        """Drop the span if the queue is full: the base class would drop an earlier span without counting it."""
        if self._ended - self._counting.exported >= self._most:
            self._counting.lose(1)
            return
        self._ended += 1
        super().on_end(span)

    async def stop(self) -> None:
        """Export the remaining spans for LAST_SECONDS at most."""
        stopping = threading.Thread(target=self.shutdown, name="traces-stop", daemon=True)
        stopping.start()
        await asyncio.to_thread(stopping.join, LAST_SECONDS)
        if stopping.is_alive():
            self._counting.give_up(self._ended)
            await asyncio.to_thread(self._counting.shutdown)


class _Counting(SpanExporter):
    """An exporter in the processor's thread that counts spans: the lost ones, and all (`exported`)."""

    def __init__(self, exporter: SpanExporter, lost: Counter) -> None:
        self._exporter = exporter
        self._lost = lost
        self._lock = threading.Lock()
        self._is_broken = self._is_closed = False
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        if not self._is_closed:
            try:
                result = self._exporter.export(spans)
            except Exception:
                log.exception("failed to export spans")
        is_broken = result is not SpanExportResult.SUCCESS
        if is_broken and not self._is_broken:
            log.warning("the collector rejected spans: spans are dropped until it accepts them again")
        self._is_broken = is_broken
        with self._lock:
            if not self._is_closed:
                self.exported += len(spans)
                self._lost.add(len(spans) * is_broken)
        return result

    def lose(self, number: int) -> None:
        with self._lock:
            self._lost.add(number)

    def give_up(self, ended: int) -> None:
        """Count the spans that are not exported yet as lost."""
        with self._lock:
            self._is_closed = True
            self._lost.add(ended - self.exported)

    def shutdown(self) -> None:
        self._exporter.shutdown()


Attributes = dict[str, str | int | float | bool | None]
"""The attributes of a span; the ones that are None are left out."""

OPERATIONS: Mapping[str, str] = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""`gen_ai.operation.name` by the label of the path; the label itself for other paths."""

FIRST_ERROR = 400
FAILURES = frozenset((Ending.UPSTREAM_FAILED, Ending.TIMED_OUT, Ending.EVICTED, Reason.INTERNAL))
"""Outcomes that are errors whatever the status, which the client may have got before."""


def operation(path: str) -> str:
    label = path_label(path)
    return OPERATIONS.get(label, label)


def _of_request(request: InferenceRequest) -> Attributes:
    return {
        "gen_ai.operation.name": operation(request.path),
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.max_tokens": request.max_tokens or None,
        "kvlane.tenant": request.tenant or None,
    }


def _of_request_end(
    client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None
) -> Attributes:
    found: Attributes = {
        "http.request.method": client_request.method,
        "url.path": client_request.path,
        "kvlane.request_id": client_request.id,
        "kvlane.outcome": outcome.value,
    }
    if attempt is not None:
        found["kvlane.endpoint"] = attempt.endpoint.name
        found["kvlane.attempts"] = attempt.number + 1
        found |= _of_response(attempt, attempt.stream_started_at or attempt.first_byte_at, client_request.received_at)
    return found | _of_status(status, outcome)


def _of_decision(request: InferenceRequest, candidates: int, decision: Decision) -> Attributes:
    return {
        "kvlane.candidates": candidates,
        "kvlane.endpoint": decision.target.name,
        "kvlane.prompt_tokens_estimated": request.prompt.tokens,
        "kvlane.profile": decision.profile or None,
        "kvlane.prefill_endpoint": decision.prefill[0].name if decision.prefill else None,
        "kvlane.stages": decision.split_outcome or None,
    }


def _of_attempt(attempt: Attempt) -> Attributes:
    """Return the attributes of an attempt at its start."""
    endpoint, parts = attempt.endpoint, urlsplit(attempt.endpoint.url)
    return {
        **_of_request(attempt.request),
        "gen_ai.provider.name": endpoint.engine,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "kvlane.endpoint": endpoint.name,
        "kvlane.role": endpoint.role or None,
        "kvlane.stage": attempt.stage.value,
        "kvlane.attempt": attempt.number,
    }


def _of_attempt_end(attempt: Attempt) -> Attributes:
    return {
        "kvlane.predicted_cached_tokens": attempt.predicted_cached_tokens,
        **_of_response(attempt, attempt.first_byte_at, attempt.started_at),
        **_of_status(attempt.status, attempt.ending or Ending.COMPLETE),
    }


def _of_response(attempt: Attempt, first_byte_at: float | None, since: float) -> Attributes:
    """Return the usage, and the time from `since` to the first chunk in seconds; only for streams, as the convention
    requires, because other responses arrive when they are complete."""
    found: Attributes = {}
    if usage := attempt.usage:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if first_byte_at is not None and attempt.request.stream:
        found["gen_ai.response.time_to_first_chunk"] = first_byte_at - since
    return found


def _of_status(status: int | None, outcome: Ending | Reason) -> Attributes:
    """Return the status and the error. A complete response may be an error of the pod."""
    error = str(status) if status is not None and status >= FIRST_ERROR else None
    return {
        "http.response.status_code": status,
        "error.type": error if outcome is Ending.COMPLETE else outcome.value,
    }


PROPAGATOR = TraceContextTextMapPropagator()
IDS = RandomIdGenerator()


@dataclass(frozen=True, slots=True)
class UnsampledTrace:
    """A request that is not sampled: `traceparent` makes pods skip it too."""

    traceparent: str


TRACE: DataKey[Span | UnsampledTrace] = DataKey("Trace")
"""Key of the span of a request."""

SPAN: DataKey[Span] = DataKey("Span")
"""Key of the span of an attempt."""


class Tracing(Listener):
    """The listener that creates spans of sampled requests. A traceparent header decides what is sampled."""

    def __init__(self, settings: TracingSettings, version: str, clock: Clock) -> None:
        self._settings = settings
        self._limit = TraceIdRatioBased(settings.sample).bound
        resource = Resource.create({"service.name": settings.service_name, "service.version": version})
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
        self._tracer = self._provider.get_tracer("kvlane", version)
        self._clock = clock

    def start(self, stack: AsyncExitStack, lost: Counter) -> None:
        """Export ended spans from now on; export the remaining spans when the stack ends."""
        settings = self._settings
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # the queue logs the first failure
        has_path = urlsplit(settings.endpoint).path.strip("/")
        url = settings.endpoint if has_path else settings.endpoint.rstrip("/") + TRACES_PATH
        headers = dict(settings.collector_headers)
        queue = SpanQueue(OTLPSpanExporter(url, headers=headers, timeout=EXPORT_TIMEOUT), lost)
        self._provider.add_span_processor(queue)
        stack.push_async_callback(queue.stop)

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision,
        started: float,
        record: DecisionRecord | None = None,
    ) -> None:
        trace = self._of(request)
        if isinstance(trace, UnsampledTrace):
            return
        span = self._tracer.start_span("schedule", set_span_in_context(trace), start_time=self._ns(started))
        _describe(span, _of_decision, request, len(candidates), decision)
        span.end(self._ns(self._clock.now()))

    def attempt_started(self, attempt: Attempt) -> None:
        """Send the span of the attempt as parent of the pod's spans."""
        request, trace = attempt.request, self._of(attempt.request)
        if isinstance(trace, UnsampledTrace):
            attempt.upstream_headers.append(("traceparent", trace.traceparent))
            return
        started = self._ns(attempt.started_at)
        span = self._tracer.start_span(
            _name_of(request), set_span_in_context(trace), SpanKind.CLIENT, start_time=started
        )
        _describe(span, _of_attempt, attempt)
        attempt.state[SPAN] = span
        headers: dict[str, str] = {}
        PROPAGATOR.inject(headers, set_span_in_context(span))
        attempt.upstream_headers.extend(headers.items())

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        trace = self._of(attempt.request)
        if isinstance(trace, UnsampledTrace) or (span := attempt.state.pop(SPAN, None)) is None:
            return
        _describe(span, _of_attempt_end, attempt)
        self._end(span, attempt.status or 0, attempt.ending)

    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        """End the span. A request that was refused before a pod was chosen gets its span here."""
        trace = None if attempt is None else attempt.request.state.read(TRACE)
        if trace is None:
            trace = self._start(client_request.headers, client_request.received_at, operation(client_request.path))
        if isinstance(trace, UnsampledTrace):
            return
        _describe(trace, _of_request_end, client_request, status, outcome, attempt)
        self._end(trace, status, outcome)

    def _end(self, span: Span, status: int, outcome: Ending | Reason | None) -> None:
        if status >= 500 or outcome in FAILURES:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(self._clock.now()))

    def _of(self, request: InferenceRequest) -> Span | UnsampledTrace:
        trace = request.state.read(TRACE)
        if trace is None:
            trace = self._start(request.headers, request.received_at, _name_of(request))
            if isinstance(trace, Span):
                _describe(trace, _of_request, request)
            request.state.write(TRACE, trace)
        return trace

    def _start(self, headers: Mapping[str, str], received_at: float, name: str) -> Span | UnsampledTrace:
        """Start a trace. An unreadable or missing traceparent starts a new one. Requests that are not sampled skip the
        SDK, which is slow to drop them."""
        parent = PROPAGATOR.extract(headers) if "traceparent" in headers else None
        if parent is None or not get_current_span(parent).get_span_context().is_valid:
            drawn = IDS.generate_trace_id()
            if drawn & TraceIdRatioBased.TRACE_ID_LIMIT >= self._limit:
                return UnsampledTrace(f"00-{drawn:032x}-{IDS.generate_span_id():016x}-00")
        return self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=self._ns(received_at))

    def _ns(self, at: float) -> int:
        return round((self._clock.wall() - self._clock.now() + at) * 1e9)


def _name_of(request: InferenceRequest) -> str:
    return f"{operation(request.path)} {request.model}".rstrip()


def _describe(span: Span, attributes: Callable[..., Attributes], *about: Any) -> None:
    if span.is_recording():
        span.set_attributes({name: value for name, value in attributes(*about).items() if value is not None})
