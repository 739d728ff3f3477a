"""Changes to a pod's response on its way to the client: transforms that see whole events, and the framing behind them.
One of them records what the client has received of a stream, so that another pod can continue it. See "A stream that is
cut" in docs/architecture.md.

Upstream bytes -> events -> transforms -> framing -> client. A response without transforms does not come here: its reads
pass as they are. Nothing here does I/O. `openai.continuation` has the formats of the API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from proxy.core.attempt import NOT_YET, Attempt
from proxy.core.errors import BadRequest, StreamInterrupted, UpstreamFailed
from proxy.core.ports import any_matches
from proxy.core.request import InferenceRequest, changed
from proxy.http.framing import LAST_CHUNK, Framing, Marks, Pieces, chunk
from proxy.openai.bodies import renamed, renaming
from proxy.openai.continuation import (
    PATHS,
    ContinuableRequest,
    PartialResponse,
    RestOfResponse,
    rest,
    with_token_counts,
    without_counts,
)
from proxy.openai.errors import ABORTED, declined
from proxy.openai.events import EVENT_END, EVENT_ENDS, DropUsage, telling

LARGEST_EVENT = 1024 * 1024
"""Bytes of an event that wait for its end. A larger one goes through the transforms in parts."""

LARGEST_WHOLE = 4 * 1024 * 1024
"""Bytes of a response of known length that wait for its end, because the length changes. A larger one passes
unchanged."""


ResponseTransform = Callable[[list[bytes], bool], list[bytes]]
"""One change to a stream: (events, ends) -> the events to pass on. `ends`: no more events follow, so none may be held
back. An event without a blank line at its end is incomplete: the stream ended, or the event is too long."""


class Pipeline(Framing):
    """The framing of a stream whose events go through transforms: each event in its own chunk, as engines send them."""

    __slots__ = ("_begun", "_chunked", "_has_sent_part", "_transforms")
    holds_nothing = True

    def __init__(self, transforms: Sequence[ResponseTransform], chunked: bool) -> None:
        """`chunked`: the client gets chunks, else the bare body."""
        self._transforms = tuple(transforms)
        self._chunked = chunked
        self._begun = bytearray()
        """An incomplete event."""
        self._has_sent_part = False
        """Whether a part of an incomplete event was sent."""

    def feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        return self.process(b"".join(bodies))

    def process(self, body: bytes) -> bytes:
        """Return what goes to the client of the next bytes of the body."""
        events = self._events(body)
        for transform in self._transforms:
            events = transform(events, False)
        return self._framed(events)

    def finish(self, raw: bytes, bodies: Pieces, exact: bool) -> bytes:
        events = self._events(b"".join(bodies))
        if self._begun:
            events.append(bytes(self._begun))
            self._begun.clear()
            self._has_sent_part = True
        return self._framed(_at_end(self._transforms, events)) + (LAST_CHUNK if self._chunked else b"")

    def end_with(self, event: bytes, tail: bytes) -> bytes | None:
        """End the stream: drop an incomplete event, flush the transforms, then append `event`."""
        separator = [b"\n\n"] if self._has_sent_part else []
        events = [*separator, *_at_end(self._transforms, []), event]
        return self._framed(events) + (LAST_CHUNK if self._chunked else b"")

    def resume(self) -> None:
        """Continue with the events of another response. Nothing of the incomplete event was sent."""
        self._begun.clear()

    def _events(self, body: bytes) -> list[bytes]:
        begun = self._begun
        if not begun and body.endswith(b"\n\n") and body.find(b"\n\n") == len(body) - 2 and b"\r" not in body:
            self._has_sent_part = False
            return [body]
        events: list[bytes] = []
        searched, start = max(0, len(begun) - 3), 0
        begun += body
        if EVENT_END.search(begun, searched) is not None:
            text = bytes(begun)
            for found in EVENT_END.finditer(text, searched):
                events.append(text[start : found.end()])
                start = found.end()
            begun[:] = text[start:]
            self._has_sent_part = False
        if len(begun) > LARGEST_EVENT:
            events.append(bytes(begun))
            begun.clear()
            self._has_sent_part = True
        return events

    def _framed(self, events: list[bytes]) -> bytes:
        if not self._chunked:
            return b"".join(events)
        return chunk(events[0]) if len(events) == 1 else b"".join(map(chunk, events))


class WholeBody(Framing):
    """The framing of a JSON text of known length, which goes through the transforms at its end, as its length
    changes."""

    __slots__ = ("_pieces", "_size", "_transforms")

    def __init__(self, transforms: Sequence[ResponseTransform]) -> None:
        self._transforms = transforms
        self._pieces: list[bytes] | None = []
        """None once the body has become too large to wait for its end."""
        self._size = 0

    def feed(self, raw: bytes, bodies: Pieces, marks: Marks) -> bytes:
        if self._pieces is None:
            return b"".join(bodies)
        self._pieces += bodies
        self._size += sum(map(len, bodies))
        if self._size <= LARGEST_WHOLE:
            return b""
        pieces, self._pieces = self._pieces, None
        return b"".join(pieces)

    def finish(self, raw: bytes, bodies: Pieces, exact: bool) -> bytes:
        if self._pieces is None:
            return b"".join(bodies)
        body = b"".join((*self._pieces, *bodies))
        return b"".join(_at_end(self._transforms, [body])) if body else b""


def is_changed(attempt: Attempt) -> bool:
    """Return whether the response names another model than the client did, or other cached tokens than it should."""
    return attempt.cached_to_report is not None or _requested_name(attempt) is not None


def transforms_of(attempt: Attempt, whole: bool = False) -> list[ResponseTransform]:
    """Return the transforms for the model's name and the cached tokens; `whole`: of a JSON text, not of events."""
    transforms: list[ResponseTransform] = []
    if (named_model := _requested_name(attempt)) is not None:
        transforms.append(_renaming(attempt, named_model, whole))
    if attempt.cached_to_report is not None:
        transforms.append(partial(_report_cached, attempt))
    return transforms


def _renaming(attempt: Attempt, named_model: str, whole: bool) -> ResponseTransform:
    """Return the transform that replaces the model name by the one that the client used."""
    names = (attempt.endpoint.models or frozenset()) | {attempt.request.model}
    rename = (lambda body: renamed(body, named_model) or body) if whole else renaming(names, named_model)
    return lambda events, ends: list(map(rename, events))


def _report_cached(attempt: Attempt, events: list[bytes], ends: bool) -> list[bytes]:
    """Report the cached tokens of the pod that computed the prompt, if another one responds. The number may become
    known while the response is sent; usage comes last."""
    cached = attempt.cached_to_report
    return events if cached is None or cached == NOT_YET else list(map(telling(cached), events))


def event_transforms(
    attempt: Attempt, continuation: Continuation | None = None, is_patched: bool = True
) -> list[ResponseTransform]:
    """Return the transforms of a stream of events, with the ones of `transforms_of` if it `is_patched`."""
    transforms: list[ResponseTransform] = []
    if continuation is not None:
        continuation.is_recorded = True
        transforms.append(continuation.record)
    if attempt.request.usage_added:
        transforms.append(DropUsage().process)
    return transforms + transforms_of(attempt) if is_patched else transforms


def _at_end(transforms: Sequence[ResponseTransform], events: list[bytes]) -> list[bytes]:
    for transform in transforms:
        events = transform(events, True)
    return events


def _requested_name(attempt: Attempt) -> str | None:
    """Return the name to give to the model; None if it is unchanged."""
    request = attempt.request
    if request.naming is None or request.naming.requested == request.model:
        return None
    return request.naming.requested


ERROR = b'data: {"error"'
"""The start of an event that reports why the stream ends."""


class Continuation:
    """A response whose parts several pods may send. The client request holds it. Until a response has started each
    attempt gets a new one; the attempts after that share the last one."""

    def __init__(self, request: InferenceRequest, continuable: ContinuableRequest) -> None:
        self.request = request
        self.continuable = continuable
        self.pod_request = request
        """The request as pods receive it."""
        if continuable.body is not request.body:
            self.pod_request = changed(
                request, body=continuable.body, usage_added=request.usage_added or continuable.usage_added
            )
        self.partial = PartialResponse()
        self.is_recorded = False
        """Whether it is a stream of events that goes through `record`."""
        self.failure: UpstreamFailed | None = None
        """Set when the stream reports that its engine failed; the following events are dropped."""
        self.pipeline: Pipeline | None = None
        """The pipeline of the stream between two attempts, while no pod sends it."""
        self._rest: RestOfResponse | None = None
        self._has_begun = False

    def record(self, events: list[bytes], ends: bool) -> list[bytes]:
        """Record what the client receives of a stream of events. This is the first of its transforms."""
        if events and not events[-1].endswith(EVENT_ENDS):
            if ends:
                events = events[:-1]  # clients drop an event without end
            else:
                self.partial.is_plain = False
        passed = []
        for event in events:
            if self.failure is not None or (self._has_begun and self._find_failure(event)):
                break
            self._has_begun = True
            if self._rest is None or (event := self._rest.event(event)):
                passed.append(event)
        self.partial.add(b"".join(passed))
        return list(map(without_counts, passed)) if self.continuable.counts_added else passed

    def _find_failure(self, event: bytes) -> bool:
        """Set `failure` if the event is vLLM's report that its engine has died or will. Return whether it is."""
        if ABORTED in event:
            self.failure = UpstreamFailed("it aborted the response")
        elif ERROR in event:
            self.failure = declined(event[event.find(ERROR) :])
        return self.failure is not None

    def resume(self, pipeline: Pipeline) -> None:
        """Continue with a pod that has started to send the rest."""
        self._rest, self.failure = RestOfResponse(self.partial), None
        pipeline.resume()

    def end(self, event: bytes) -> bytes:
        """Return the end of a stream that no pod continues: `event`, if the end is open."""
        pipeline, self.pipeline = self.pipeline, None
        return (pipeline and pipeline.end_with(event, b"")) or b""

    def interruption(self, error: UpstreamFailed) -> StreamInterrupted | None:
        """Return the error that requests the rest from the gateway; None if no pod can send it."""
        request = self.pod_request
        body = rest(request.path, request.body, self.partial) if self.is_recorded else None
        if body is None:
            return None
        interrupted = StreamInterrupted(str(error), changed(request, body=body, naming=None))
        interrupted.__cause__ = error
        return interrupted


class RestDeclined(UpstreamFailed):
    """A pod responded in one piece to the request for the rest, so no pod will send it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it declined the rest of the response: {status}")
        self.refusal = BadRequest(f"The rest of this response was refused: {status}.")


def make_continuable(before: Continuation | None, attempt: Attempt, models: Sequence[str]) -> Continuation | None:
    """Prepare a response that has not started for being continued, and replace the request of the attempt by the one
    with token counts. Listeners of `attempt_started` have seen the request without them. Return None and change nothing
    if no pod could continue the response or its model matches none of the patterns `models`. `before` is the
    continuation of an earlier attempt whose response did not start."""
    request = attempt.request
    if not request.stream or request.path not in PATHS or not any_matches(models, request.model):
        return None
    if before is not None and request is before.pod_request:
        request, continuable = before.request, before.continuable
    elif (found := with_token_counts(request.path, request.body)) is not None:
        continuable = found
    else:
        return None
    continuation = Continuation(request, continuable)
    attempt.request = continuation.pod_request
    return continuation
