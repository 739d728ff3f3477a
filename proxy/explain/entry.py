"""One decision, with all that it was made of, and what came of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from proxy.core.attempt import Attempt, Ending, Stage
from proxy.core.cycle_state import DataKey
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, LoadView
from proxy.core.errors import Reason
from proxy.core.record import ProfileRecord
from proxy.core.request import InferenceRequest
from proxy.flowcontrol.controller import PASSAGE
from proxy.latency.forecast import LATENCY
from proxy.prefix.keys import PREFIX_MATCH, TOKENIZED_PROMPT

PLAIN_BYTES, BYTES_PER_POD, BYTES_PER_SCORE = 4096, 320, 8
"""What an entry takes, about, rather less than more: of its own, for each candidate, and for each number of a table."""

_SITUATION = attrgetter("view", "load.requests", "load.tokens", "metrics.freshness")

Situation = tuple[LoadView, int, int, Any]
"""Of a pod: its view, requests and tokens in flight, and how fresh its scrape was."""


class Leg(NamedTuple):
    """A leg that is over. Times are monotonic seconds."""

    endpoint: Endpoint
    stage: Stage
    number: int
    answers: bool
    started_at: float
    first_byte_at: float | None
    last_byte_at: float | None
    status: int | None
    ending: Ending | None
    usage: Any
    predicted_cached_tokens: int | None
    told_cached: int | None


LEG = attrgetter(*Leg._fields)
"""Of an attempt."""


class Absent(NamedTuple):
    """A pod of the pool that was no candidate."""

    pod: str
    why: str


class Refusal(NamedTuple):
    """Why nobody was chosen; the error itself would keep the request's body."""

    type: str
    message: str
    reason: Reason


@dataclass(slots=True, eq=False)
class Entry:
    """Lives as long as its request, and while it is kept. Of the request nothing but lengths and names: its prompt,
    headers and body go with it. `seen`, `hits` and `ttfts` stand in the order of `candidates`; the latter two are None
    where nobody predicts. Times are monotonic seconds, but `at`."""

    id: str
    request: str
    at: float
    """Of the decision, in seconds since the epoch."""
    pool: str
    model: str
    path: str
    tenant: str
    priority: int
    stream: bool
    prompt_tokens: int
    received_at: float
    decided_at: float
    queued_since: float | None
    """When it came to flow control."""
    asked: bool
    """Its client wants to know."""
    candidates: tuple[Endpoint, ...]
    seen: tuple[Situation, ...]
    hits: Sequence[int] | None
    ttfts: Sequence[float] | None
    absent: tuple[Absent, ...]
    records: tuple[ProfileRecord, ...]
    shares: dict[str, dict[str, tuple[float, float]]]
    """(weight, part of the total) of scorers, by profile; all entries of a configuration have the same."""
    decision: Decision | None
    refusal: Refusal | None
    legs: list[Attempt | Leg] = field(default_factory=list)
    """Attempts are those that have not ended."""
    outcome: Ending | Reason | None = None
    status: int | None = None
    ended_at: float | None = None
    bytes: int = 0

    @property
    def last(self) -> Attempt | Leg | None:
        """The latest leg for the client; of a hedge's two, the one that did better."""
        legs = [leg for leg in self.legs if leg.answers]
        begun = [leg for leg in legs if leg.ending is not Ending.EVICTED and leg.first_byte_at is not None]
        return (begun or legs)[-1] if legs else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's head to the first byte for its client."""
        last = self.last
        return None if last is None or last.first_byte_at is None else last.first_byte_at - self.received_at

    def is_slower_than(self, seconds: float, now: float) -> bool:
        """To its first byte, or until now."""
        ttft = self.ttft
        if ttft is None:
            ttft = (now if self.ended_at is None else self.ended_at) - self.received_at
        return ttft > seconds

    @property
    def failed(self) -> bool:
        """It ended, and not because it was answered, or its client had enough."""
        return self.outcome is not None and self.outcome not in (Ending.COMPLETE, Ending.CLIENT_GONE)


ENTRY: DataKey[Entry] = DataKey("DecisionEntry")


class Predictions(NamedTuple):
    """For each candidate: tokens of the prompt in its KV cache, and seconds until the first token."""

    hits: Sequence[int] | None
    ttfts: Sequence[float] | None


def situations(endpoints: Sequence[Endpoint]) -> tuple[Situation, ...]:
    return tuple(map(_SITUATION, endpoints))


def predictions(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Predictions:
    """As plugins see them, before anything is reserved."""
    match, forecast = request.state.read(PREFIX_MATCH), request.state.read(LATENCY)
    if not endpoints:
        return Predictions(None, None)
    hits = None if match is None else array("q", match.lengths(endpoints))
    return Predictions(hits, None if forecast is None else array("d", forecast.ttfts(endpoints)))


def queued_since(request: InferenceRequest) -> float | None:
    passage = request.state.read(PASSAGE)
    return None if passage is None else passage.waiting.since


def tokens_of(request: InferenceRequest) -> int:
    return (request.state.read(TOKENIZED_PROMPT) or request.prompt).tokens


def size(candidates: int, records: Sequence[ProfileRecord]) -> int:
    """Bytes that an entry takes, about."""
    columns = sum(len(record.scored) * (len(record.scores) + 4) for record in records)
    return PLAIN_BYTES + candidates * BYTES_PER_POD + columns * BYTES_PER_SCORE
