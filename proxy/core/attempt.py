"""One try of a request on one endpoint: what is sent and how it ends; and the pods that crashed during the tries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import KvlaneError, RequestError, UpstreamTimedOut
from proxy.core.listener import NO_LISTENERS, Listeners
from proxy.core.request import DataKey, InferenceRequest

if TYPE_CHECKING:
    from proxy.core.decision import DecisionRecord


class Ending(Enum):
    """How an attempt ended; every attempt has exactly one ending. Why kvlane refused a request is a `Reason`."""

    COMPLETE = "complete"
    CLIENT_GONE = "client-gone"
    """The client left, or its upload broke off."""
    UPSTREAM_FAILED = "upstream-failed"
    TIMED_OUT = "timed-out"
    EVICTED = "evicted"
    """kvlane ended it: for a request of higher priority, for another attempt of the request, because it stops, because
    it closed the connection of the client, or because of a defect of its own."""


def ending_of(error: KvlaneError) -> Ending:
    """Return the ending of an attempt that failed with this error. A RequestError is the client's: its upload stalled,
    is invalid or is too large."""
    if isinstance(error, RequestError):
        return Ending.CLIENT_GONE
    return Ending.TIMED_OUT if isinstance(error, UpstreamTimedOut) else Ending.UPSTREAM_FAILED


class Stage(Enum):
    """The stage of a request that an attempt serves."""

    WHOLE = "whole"
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    """Generate the response; another pod has computed the prompt."""


WHOLE, COMPLETE, UPSTREAM_FAILED = Stage.WHOLE, Ending.COMPLETE, Ending.UPSTREAM_FAILED
"""Read from the class once. Before Python 3.12 reading an enum member calls `__getattr__`
(hot path, see docs/notes/cpu.md)."""


NOT_YET = -1
"""The number of cached tokens that the client will see is not known yet."""


class Usage(NamedTuple):
    """Token counts of the engine; `cached_tokens` is None if the engine does not report it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Attempt:
    """Created after the decision; over when its PostResponse hooks have run. Times are monotonic seconds, None before
    the event. The relay sets `sent_at`, `status`, `first_byte_at`, `last_byte_at`, `response_bytes`, `chunks`, `usage`,
    `response_id` and `ending`. A PreRequest hook may add to `upstream_headers` and `response_headers`.

    Two moments differ. The response has *started* once its head goes to the client: `status` is set, and no other pod
    is tried except to continue the stream. The *first byte* is the first one of the body that is relayed, for a stream
    with its first event: `first_byte_at`, the event `first_byte` and `timeouts.firstByte`."""

    error: str = ""
    """Why the attempt failed, for the access log. On the class, because only failed attempts have one."""
    stream_started_at: float | None = None
    """For an attempt that continues a stream: the time of the first byte of the stream, from an earlier attempt."""
    is_by_envoy: bool = False
    """Whether Envoy, in front of kvlane, responded itself, so that the response is not that of the pod: it has no
    `first_byte_at`."""

    def __init__(
        self, request: InferenceRequest, decision: Decision, endpoint: Endpoint, number: int, started_at: float
    ) -> None:
        self.request = request
        self.decision = decision
        self.endpoint = endpoint
        self.number = number
        self.started_at = started_at
        # All of it on the object: reading from the class is slower (hot path, see docs/notes/cpu.md).
        self.stage: Stage = WHOLE
        self.for_client: bool = True
        """Whether the response goes to the client, not to the next stage."""
        self.upstream_headers: list[tuple[str, str]] = []
        self.response_headers: list[tuple[str, str]] = []
        self.listeners: Listeners = NO_LISTENERS
        """The listeners of the pool when the attempt starts. A reload does not change them."""
        self.state: dict[DataKey[Any], Any] = {}
        """State that listeners and hooks keep until the attempt ends, each under its own key."""
        self.record: DecisionRecord | None = None
        """The record of its decision, if there is one."""
        self.cached_to_report: int | None = None
        """The number of cached tokens to report to the client if the prompt was computed by another pod, which alone
        knows it. NOT_YET while that pod is computing."""
        self.sent_at: float | None = None
        """When the request was last written to a connection of the pod, or Envoy got its destination; None: nothing was
        sent. An attempt has it from its start only if Envoy went on to its pod by itself, which has responded."""
        self.status: int | None = None
        """The status that the pod sent. It is set once the response goes to the client, so not by a response that is
        retried instead. `Relay.collect`, which relays nothing, sets it for every response."""
        self.first_byte_at: float | None = None
        self.last_byte_at: float | None = None
        self.chunks: int = 0
        self.response_bytes: int = 0
        self.usage: Usage | None = None
        self.response_id: str | None = None
        """The id of a `/v1/responses` response. Later requests about it must reach the same pod."""
        self.ending: Ending | None = None
        self.charge: tuple[int, int] | None = None
        """Prompt and completion tokens that `fleet.ledger`, which alone sets it, counts on the pod for this attempt."""
        self.retries: Any = None
        """`RetryState` of the request, carried from attempt to attempt; only `reliability.failover` reads its data."""
        self.is_continuation: bool = False
        """Whether it continues a response that another attempt started."""
        self.predicted_cached_tokens: int | None = None
        """Prompt tokens that the prefix index expects in the pod's KV cache when the attempt starts; None: no
        prediction."""

    def note_first_byte(self, now: float) -> None:
        """Record the first byte of the body, and call the listeners. `now` is monotonic seconds."""
        self.first_byte_at = now
        for listener in self.listeners.first_byte:
            try:
                listener(self)
            except Exception:  # noqa: BLE001  # the response goes on
                self.listeners.failed(listener, self.request.id)

    def note_stored_response(self) -> None:
        """Call the listeners if the pod keeps the response that it streams: its client may refer to it from now on."""
        for listener in self.listeners.response_stored if self.response_id else ():
            try:
                listener(self, None)
            except Exception:  # noqa: BLE001  # the response goes on
                self.listeners.failed(listener, self.request.id)

    @property
    def succeeded(self) -> bool:
        """Whether the pod sent a complete response without an error."""
        is_good = self.ending is COMPLETE and self.status is not None and self.status < 300
        return is_good and not self.is_by_envoy


@dataclass(slots=True, eq=False)
class Crashes:
    """Pods that crashed during one client request; shared by its retries, hedged attempts, stages and fallback
    models."""

    crashed: list[Endpoint] = field(default_factory=list)
    """Pods that accepted no connection afterwards, in order. A pod that restarted and crashed again is in it twice."""
    suspected: list[Endpoint] = field(default_factory=list)
    """Pods that closed the connection and may still be alive."""
    met_closing_connection: bool = False
    """Whether the request already met a pod that was closing an idle connection. A second time is no coincidence."""
    fingerprint: bytes = b""
    """Identifies the request as the client sent it, even if a later attempt asks for the rest of a stream; empty until
    the first pod is checked."""
    _noted: set[tuple[Endpoint, float, int]] = field(default_factory=set)

    def add_suspected(self, attempt: Attempt) -> None:
        """Record that the pod may have crashed: it closed the connection, or another pod that serves the same request
        did."""
        pod = attempt.endpoint.first_rank
        one = (pod, attempt.started_at, attempt.number)
        if one not in self._noted and pod not in self.suspected:
            self.suspected.append(pod)
        self._noted.add(one)

    def confirm(self, endpoint: Endpoint) -> bool:
        """Record that the pod accepts no connection. Return whether that is new."""
        if endpoint not in self.suspected:
            return False
        self.suspected.remove(endpoint)
        self.crashed.append(endpoint)
        return True


CRASHES: DataKey[Crashes] = DataKey("Crashes")


def crashes_of(request: InferenceRequest) -> Crashes:
    """Return the crashes of the request, which all copies of the request share."""
    known = request.state.read(CRASHES)
    if known is None:
        known = Crashes()
        request.state.write(CRASHES, known)
    return known
