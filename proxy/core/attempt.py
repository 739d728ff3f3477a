"""One try of a request on one endpoint: what is sent, and what came of it. Over all tries: pods that died of it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.listener import NO_LISTENERS, Listeners
from proxy.core.request import DataKey, InferenceRequest

if TYPE_CHECKING:
    from proxy.core.decision import DecisionRecord


class Ending(Enum):
    """How a leg ended; every leg has exactly one."""

    COMPLETE = "complete"
    CLIENT_GONE = "client-gone"
    UPSTREAM_FAILED = "upstream-failed"
    TIMED_OUT = "timed-out"
    EVICTED = "evicted"


class Stage(Enum):
    """What of a request a leg is for."""

    WHOLE = "whole"
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    """The prompt is computed elsewhere."""


WHOLE, COMPLETE, UPSTREAM_FAILED = Stage.WHOLE, Ending.COMPLETE, Ending.UPSTREAM_FAILED
"""Taken from the class once: before Python 3.12 looking at an enum goes through a `__getattr__`: 450 instructions."""


NOT_YET = -1
"""What will be told of cached tokens is not known."""


class Usage(NamedTuple):
    """Tokens as the engine counted them; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Attempt:
    """Lives from PreRequest to PostResponse. Times are monotonic seconds, None until the moment has come.

    The relay fills in `sent_at`, `status` (of the pod's answer), `first_byte_at`, `last_byte_at`, `response_bytes`,
    `chunks`, `usage`, `response_id` and `ending`. A PreRequest hook may add to `upstream_headers` and
    `response_headers`.
    """

    def __init__(
        self, request: InferenceRequest, decision: Decision, endpoint: Endpoint, number: int, started_at: float
    ) -> None:
        self.request = request
        self.decision = decision
        self.endpoint = endpoint
        self.number = number
        self.started_at = started_at
        # All of it on the object: what is found on the class only takes 200 instructions to read, not 60.
        self.stage: Stage = WHOLE
        self.answers: bool = True
        """Whether what the pod answers is for the client, and not for the next stage."""
        self.upstream_headers: list[tuple[str, str]] = []
        self.response_headers: list[tuple[str, str]] = []
        self.listeners: Listeners = NO_LISTENERS
        """Those of its pool, from its start on; one that is in flight during a reload keeps them."""
        self.state: dict[DataKey[Any], Any] = {}
        """What listeners and hooks keep of the attempt until it ends, each by a key of its own."""
        self.record: DecisionRecord | None = None
        """That of its decision, where it has one."""
        self.told_cached: int | None = None
        """What the client is told of cached tokens, where the pod that answers cannot know: another computed the
        prompt. NOT_YET while that one is at it."""
        self.sent_at: float | None = None
        """When the request was last written to a connection to the pod; None: nothing of it was sent."""
        self.status: int | None = None
        self.first_byte_at: float | None = None
        self.last_byte_at: float | None = None
        self.chunks: int = 0
        self.response_bytes: int = 0
        self.usage: Usage | None = None
        self.response_id: str | None = None
        """The id that `/v1/responses` gave its answer: later requests about it must reach the same pod."""
        self.ending: Ending | None = None
        self.charge: tuple[int, int] | None = None
        """Tokens of prefill and of answer that `fleet.ledger`, its only writer, has on the pod for this leg."""
        self.retries: Any = None
        """Of a request that failed before; `reliability.failover`, its only reader, keeps it here."""
        self.continued: bool = False
        """Whether it goes on with an answer that another leg has begun."""
        self.predicted_cached_tokens: int | None = None
        """Prompt tokens the prefix index expects in the pod's KV cache, set when the leg begins; None: no
        prediction."""

    def begin_response(self, now: float) -> None:
        """The first byte of the response arrived. `now` is monotonic seconds."""
        self.first_byte_at = now
        for listener in self.listeners.first_byte:
            listener(self)

    @property
    def succeeded(self) -> bool:
        """The pod gave the whole of a good answer."""
        return self.ending is COMPLETE and self.status is not None and self.status < 300


class Casualties:
    """Of one client request: retries, hedged attempts, prefill, decode and fallback models share it."""

    __slots__ = ("_noted", "deaths", "had_close_race", "suspected")

    def __init__(self) -> None:
        self.deaths: list[Endpoint] = []
        """Pods that accepted no connection afterwards, in order; a pod that restarted and died again is in it twice."""
        self.suspected: list[Endpoint] = []
        """Pods that closed the connection and may still be alive."""
        self.had_close_race = False
        """Whether the request met a pod that was just closing an idle connection. The second time is no accident."""
        self._noted: set[tuple[Endpoint, float, int]] = set()

    def suspect(self, attempt: Attempt) -> None:
        """Note that its pod closed the connection, or had the request together with one that did."""
        pod = attempt.endpoint.lead
        one = (pod, attempt.started_at, attempt.number)
        if one not in self._noted and pod not in self.suspected:
            self.suspected.append(pod)
        self._noted.add(one)

    def confirm(self, endpoint: Endpoint) -> bool:
        """Note that the pod accepts no connection. Return whether that was unknown."""
        if endpoint not in self.suspected:
            return False
        self.suspected.remove(endpoint)
        self.deaths.append(endpoint)
        return True


CASUALTIES: DataKey[Casualties] = DataKey("Casualties")


def casualties_of(request: InferenceRequest) -> Casualties:
    """Return those of the request; all copies of a request have the same."""
    known = request.state.read(CASUALTIES)
    if known is None:
        known = Casualties()
        request.state.write(CASUALTIES, known)
    return known
