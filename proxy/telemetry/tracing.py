"""Traces: a span for a request, in it one for its decision and one for each leg. Needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.core.attempt import Attempt, Ending
from proxy.core.cycle_state import DataKey
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.listener import Listener
from proxy.core.ports import Call, Clock
from proxy.core.record import DecisionRecord
from proxy.core.request import InferenceRequest
from proxy.telemetry import span_attributes as attributes
from proxy.telemetry.settings import TracingSettings

PROPAGATOR = TraceContextTextMapPropagator()
BAD_STATUS = 500


IDS = RandomIdGenerator()


@dataclass(slots=True)
class Trace:
    """Of one request that is sampled, as long as it lives."""

    span: Span
    inside: Context


@dataclass(frozen=True, slots=True)
class Undrawn:
    """Of one that is not: `traceparent` has pods leave it out too."""

    traceparent: str


TRACE: DataKey[Trace | Undrawn] = DataKey("Trace")
SPAN: DataKey[Span] = DataKey("Span")
"""Of an attempt."""


class Tracing(Listener):
    """Makes the spans of requests that are sampled; those that come with a traceparent follow its flag. `ended` takes
    spans that have ended."""

    def __init__(self, settings: TracingSettings, version: str, clock: Clock, ended: SpanProcessor) -> None:
        self._limit = TraceIdRatioBased(settings.sample).bound
        resource = Resource.create({"service.name": settings.service_name, "service.version": version})
        provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(ended)
        self._tracer = provider.get_tracer("kvlane", version)
        self._clock = clock

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision,
        started: float,
        record: DecisionRecord | None = None,
    ) -> None:
        trace = self._of(request)
        if isinstance(trace, Undrawn):
            return
        span = self._tracer.start_span("schedule", trace.inside, start_time=self._ns(started))
        if span.is_recording():
            span.set_attributes(attributes.of_decision(request, len(candidates), decision))
        span.end(self._ns(self._clock.now()))

    def attempt_started(self, attempt: Attempt) -> None:
        """The pod is told that the leg is what its own spans belong to."""
        request, trace = attempt.request, self._of(attempt.request)
        if isinstance(trace, Undrawn):
            attempt.upstream_headers.append(("traceparent", trace.traceparent))
            return
        name = attributes.name_of(request.path, request.model)
        started = self._ns(attempt.started_at)
        span = self._tracer.start_span(name, trace.inside, SpanKind.CLIENT, start_time=started)
        if span.is_recording():
            span.set_attributes(attributes.of_leg(attempt))
        attempt.state[SPAN] = span
        told: dict[str, str] = {}
        PROPAGATOR.inject(told, set_span_in_context(span))
        attempt.upstream_headers.extend(told.items())

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        trace = self._of(attempt.request)
        if isinstance(trace, Undrawn) or (span := attempt.state.pop(SPAN, None)) is None:
            return
        if span.is_recording():
            span.set_attributes(attributes.of_leg_end(attempt))
            status = attempt.status
            if attempt.ending in attributes.LOST or (status is not None and status >= BAD_STATUS):
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(self._clock.now()))

    def request_ended(
        self, call: Call, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        """What was refused before anybody was chosen gets its span here."""
        trace = None if attempt is None else attempt.request.state.read(TRACE)
        if trace is None:
            trace = self._begin(call.headers, call.received_at, attributes.operation(call.path))
        if isinstance(trace, Undrawn):
            return
        span = trace.span
        if span.is_recording():
            span.set_attributes(attributes.of_end(call, status, outcome, attempt))
            if status >= BAD_STATUS or outcome in attributes.LOST:
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(self._clock.now()))

    def _of(self, request: InferenceRequest) -> Trace | Undrawn:
        trace = request.state.read(TRACE)
        if trace is None:
            name = attributes.name_of(request.path, request.model)
            trace = self._begin(request.headers, request.received_at, name)
            if isinstance(trace, Trace) and trace.span.is_recording():
                trace.span.set_attributes(attributes.of_request(request))
            request.state.write(TRACE, trace)
        return trace

    def _begin(self, headers: Mapping[str, str], received_at: float, name: str) -> Trace | Undrawn:
        """An unreadable traceparent begins a new trace, as none does. Who is not drawn does not come as far as the SDK,
        which takes its time to say so."""
        parent = PROPAGATOR.extract(headers) if "traceparent" in headers else None
        if parent is None or not get_current_span(parent).get_span_context().is_valid:
            drawn = IDS.generate_trace_id()
            if drawn & TraceIdRatioBased.TRACE_ID_LIMIT >= self._limit:
                return Undrawn(f"00-{drawn:032x}-{IDS.generate_span_id():016x}-00")
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=self._ns(received_at))
        return Trace(span, set_span_in_context(span))

    def _ns(self, at: float) -> int:
        """Since the Unix epoch, of monotonic seconds."""
        return round((self._clock.wall() - self._clock.now() + at) * 1e9)
