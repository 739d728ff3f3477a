"""The continuation of a stream that a pod did not finish: record what the client has received, ask for the rest, and
join the parts. See "A stream that is cut" in docs/architecture.md. `openai.continuation` has the formats of the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.core.attempt import Attempt
from proxy.core.errors import BadRequest, StreamInterrupted, UpstreamFailed
from proxy.core.ports import any_matches
from proxy.core.request import InferenceRequest, changed
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
from proxy.openai.events import EVENT_ENDS

if TYPE_CHECKING:
    from proxy.http.pipeline import Pipeline

ERROR = b'data: {"error"'
"""The start of an event that reports why the stream ends."""


class Continuation:
    """A response whose parts several pods may send. It belongs to the client request and outlives the
    attempts."""

    def __init__(self, request: InferenceRequest, continuable: ContinuableRequest) -> None:
        self.request = request
        self.continuable = continuable
        self.pod_request = request
        """The request as pods receive it."""
        if continuable.body is not request.body:
            self.pod_request = changed(
                request, body=continuable.body, asks_usage=request.asks_usage or continuable.asks_usage
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
        return list(map(without_counts, passed)) if self.continuable.takes_counts else passed

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


class RestRefused(UpstreamFailed):
    """A pod responded in one piece to the request for the rest, so no pod will send it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it refused the rest of the response: {status}")
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
