"""One decision with everything it was made of and what came of it: as an entry, as JSON, as a response header."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from proxy.core.attempt import Attempt, Ending, Stage
from proxy.core.decision import Decision, ProfileRecord
from proxy.core.endpoint import Endpoint, Freshness, LoadView
from proxy.core.errors import Reason
from proxy.core.request import DataKey, InferenceRequest
from proxy.flowcontrol.controller import TICKET
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, most_cached

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
    passage = request.state.read(TICKET)
    return None if passage is None else passage.waiting.since


def tokens_of(request: InferenceRequest) -> int:
    return (request.state.read(TOKENIZED_PROMPT) or request.prompt).tokens


def size(candidates: int, records: Sequence[ProfileRecord]) -> int:
    """Bytes that an entry takes, about."""
    columns = sum(len(record.scored) * (len(record.scores) + 4) for record in records)
    return PLAIN_BYTES + candidates * BYTES_PER_POD + columns * BYTES_PER_SCORE


class Margin(NamedTuple):
    """Between totals; negative where the picker has not taken the best."""

    over: Endpoint
    by: float


def margin(record: ProfileRecord, chosen: Endpoint) -> Margin | None:
    """None where it was alone, or was not scored."""
    totals = dict(zip(record.scored, record.totals, strict=True))
    others = [pod for pod in (*record.ranked, *record.scored) if pod is not chosen]
    if chosen not in totals or not others:
        return None
    other = max(others, key=totals.__getitem__)
    return Margin(other, totals[chosen] - totals[other])


def deciding(entry: Entry) -> ProfileRecord | None:
    """The run that chose who answers."""
    if entry.decision is None:
        return None
    return next((record for record in entry.records if record.profile == entry.decision.profile), None)


def contributions(entry: Entry, record: ProfileRecord, pod: Endpoint) -> list[tuple[str, float, float]]:
    """(scorer, raw, weighted) of one pod."""
    if pod not in record.scored:
        return []
    at, portions = record.scored.index(pod), entry.shares.get(record.profile, {})
    parts = {name: portions.get(name, (0.0, 0.0))[1] for name in record.scores}
    return [(name, scores[at], scores[at] * parts[name]) for name, scores in record.scores.items()]


IN_FLIGHT = "in-flight"

DIGITS = 6

_BEFORE = ("id", "request", "asked", "waited", "queued")
_AFTER = ("outcome", "status", "answeredBy", "ttft", "e2e", "cachedTokens", "tries", "legs")
"""What only a request has that was sent."""


def short(entry: Entry) -> dict[str, Any]:
    """What is chosen, by how much, what was expected, and what came of it."""
    decision, record, last = entry.decision, deciding(entry), entry.last
    ahead = None if decision is None or record is None else margin(record, decision.target)
    return {
        "id": entry.id,
        "request": entry.request,
        "at": round(entry.at, 3),
        "pool": entry.pool,
        "model": entry.model,
        "path": entry.path,
        "tenant": entry.tenant,
        "priority": entry.priority,
        "stream": entry.stream,
        "profile": decision.profile if decision is not None else "",
        "pod": decision.target.name if decision is not None else None,
        "prefill": decision.prefill[0].name if decision is not None and decision.prefill else None,
        "why": decision.why if decision is not None else "",
        "candidates": len(entry.candidates),
        "runnerUp": None if ahead is None else ahead.over.name,
        "margin": None if ahead is None else _number(ahead.by),
        "promptTokens": entry.prompt_tokens,
        "predicted": _predicted(entry),
        "waited": _number(entry.decided_at - entry.received_at),
        "queued": None if entry.queued_since is None else _number(entry.decided_at - entry.queued_since),
        "asked": entry.asked,
        "outcome": outcome(entry),
        "status": entry.status,
        "answeredBy": None if last is None or last.first_byte_at is None else last.endpoint.name,
        "ttft": _number(entry.ttft),
        "e2e": None if entry.ended_at is None else _number(entry.ended_at - entry.received_at),
        "cachedTokens": _cached(entry),
        "tries": sum(leg.answers for leg in entry.legs),
    }


def whole(entry: Entry) -> dict[str, Any]:
    """The same, and all candidates, profiles and legs."""
    refusal = entry.refusal
    return {
        **short(entry),
        "pods": [_pod(entry, at, *pair) for at, pair in enumerate(zip(entry.candidates, entry.seen, strict=True))],
        "absent": [absent._asdict() for absent in entry.absent],
        "profiles": [_profile(entry, record) for record in entry.records],
        "decision": _decision(entry),
        "error": None if refusal is None else {"type": refusal.type, "message": refusal.message},
        "legs": [_leg(entry, leg) for leg in entry.legs],
    }


def imagined(entry: Entry) -> dict[str, Any]:
    """Of a request that nobody sent: all but what would have come of it."""
    never = (*_BEFORE, *_AFTER)
    return {key: value for key, value in whole(entry).items() if key not in never}


def outcome(entry: Entry) -> str:
    if entry.outcome is not None:
        return str(entry.outcome.value)
    return IN_FLIGHT if entry.refusal is None else entry.refusal.reason.value


def of_pod(entry: Entry, column: Sequence[float] | None, pod: Endpoint) -> float | None:
    """Its number, where it was a candidate and there are numbers."""
    return None if column is None or pod not in entry.candidates else column[entry.candidates.index(pod)]


def cached(entry: Entry, hit: int, pod: Endpoint) -> int:
    """Of the tokens that the index says are there, as many as the pod's engine can have cached."""
    return min(hit, most_cached(entry.prompt_tokens, pod.metrics.block_size))


def _predicted(entry: Entry) -> dict[str, Any]:
    """Where one pod computes the prompt and another answers it is the first that counts."""
    decision = entry.decision
    if decision is None:
        return {"ttft": None, "cachedTokens": None}
    pod = decision.prefill[0] if decision.prefill else decision.target
    hit = of_pod(entry, entry.hits, pod)
    return {
        "ttft": _number(of_pod(entry, entry.ttfts, pod)),
        "cachedTokens": None if hit is None else cached(entry, int(hit), pod),
    }


def _cached(entry: Entry) -> int | None:
    """As the pod counted them that computed the prompt."""
    last = entry.last
    if last is None:
        return None
    if last.stage is Stage.DECODE:
        return last.told_cached
    return last.usage.cached_tokens if last.usage is not None else None


def _pod(entry: Entry, at: int, pod: Endpoint, seen: Situation) -> dict[str, Any]:
    view, requests, tokens, freshness = seen
    return {
        "pod": pod.name,
        "view": {"waiting": view.waiting, "running": view.running, "kvUsage": _number(view.kv_usage)},
        "load": {"requests": requests, "tokens": tokens},
        "fresh": freshness is Freshness.FRESH,
        "hitTokens": None if entry.hits is None else cached(entry, entry.hits[at], pod),
        "ttft": None if entry.ttfts is None else _number(entry.ttfts[at]),
    }


def _profile(entry: Entry, record: ProfileRecord) -> dict[str, Any]:
    names, portions = [pod.name for pod in record.scored], entry.shares.get(record.profile, {})
    picked = _picked(entry, record)
    ahead = None if picked is None else margin(record, picked)
    return {
        "profile": record.profile,
        "shadow": record.shadow,
        "filters": [{"name": name, "removed": removed} for name, removed in record.filters.items()],
        "scorers": [
            _scorer(name, portions.get(name, (0.0, 0.0)), names, scores) for name, scores in record.scores.items()
        ],
        "totals": dict(zip(names, map(_number, record.totals), strict=True)),
        "ranked": [pod.name for pod in record.ranked],
        "picked": None if picked is None else picked.name,
        "runnerUp": None if ahead is None else ahead.over.name,
        "margin": None if ahead is None else _number(ahead.by),
    }


def _picked(entry: Entry, record: ProfileRecord) -> Endpoint | None:
    """Who answers, or else the best of the run."""
    decision = entry.decision
    if decision is not None and decision.profile == record.profile:
        return decision.target
    return record.ranked[0] if record.ranked else None


def _scorer(name: str, weight: tuple[float, float], pods: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    given, share = weight
    table = {
        pod: {"raw": _number(score), "weighted": _number(score * share)}
        for pod, score in zip(pods, scores, strict=True)
    }
    return {"name": name, "weight": given, "share": _number(share), "scores": table}


def _decision(entry: Entry) -> dict[str, Any] | None:
    if (decision := entry.decision) is None:
        return None
    stages = {"fallbacks": decision.fallbacks, "prefill": decision.prefill, "encode": decision.encode}
    names = {stage: [pod.name for pod in pods] for stage, pods in stages.items()}
    return {"target": decision.target.name, **names, "why": decision.why}


def _leg(entry: Entry, leg: Attempt | Leg) -> dict[str, Any]:
    usage, began = leg.usage, entry.received_at
    return {
        "stage": leg.stage.value,
        "pod": leg.endpoint.name,
        "attempt": leg.number,
        "forClient": leg.answers,
        "sent": _number(leg.started_at - began),
        "firstByte": None if leg.first_byte_at is None else _number(leg.first_byte_at - began),
        "lastByte": None if leg.last_byte_at is None else _number(leg.last_byte_at - began),
        "status": leg.status,
        "ending": None if leg.ending is None else leg.ending.value,
        "promptTokens": None if usage is None else usage.prompt_tokens,
        "completionTokens": None if usage is None else usage.completion_tokens,
        "cachedTokens": None if usage is None else usage.cached_tokens,
        "predictedCachedTokens": leg.predicted_cached_tokens,
    }


def _number(value: float | None) -> float | None:
    """What is no number has none in JSON."""
    return round(value, DIGITS) if value is not None and math.isfinite(value) else None


HEADER = "x-kvlane-decision"

MOST_CHARACTERS = 1000
LONGEST_NAME = 100


def summary(entry: Entry, pod: Endpoint) -> str:
    """ASCII, less than 1 KiB. `pod` is the one that the leg goes to; scorers come in the order of what they add to its
    total, and the last of them are left out where there is no room."""
    fields = list(_fields(entry, pod))
    scores = _scores(entry)
    while scores and len(_written(fields, scores)) > MOST_CHARACTERS:
        scores.pop()
    return _written(fields, scores)


def _written(fields: list[str], scores: list[str]) -> str:
    return ", ".join([*fields, *([f"scores=({' '.join(scores)})"] if scores else [])])


def _fields(entry: Entry, pod: Endpoint) -> Iterator[str]:
    decision, record = entry.decision, deciding(entry)
    if decision is None:
        return
    yield f"id={_string(entry.id)}"
    yield f"pod={_string(decision.target.name)}"
    if pod is not decision.target:
        yield f"sent-to={_string(pod.name)}"
    if decision.prefill:
        yield f"prefill={_string(decision.prefill[0].name)}"
    yield f"pool={_string(entry.pool)}"
    yield f"profile={_string(decision.profile)}"
    yield f"candidates={len(entry.candidates)}"
    if record is not None and (ahead := margin(record, decision.target)) is not None:
        yield f"margin={ahead.by:.3f}"
        yield f"runner-up={_string(ahead.over.name)}"
    computing = decision.prefill[0] if decision.prefill else decision.target
    yield f"prompt={entry.prompt_tokens}"
    if (hit := of_pod(entry, entry.hits, computing)) is not None:
        yield f"hit={cached(entry, int(hit), computing)}"
    if (ttft := of_pod(entry, entry.ttfts, computing)) is not None:
        yield f"ttft={ttft:.3f}"
    yield f"waited={entry.decided_at - entry.received_at:.3f}"


def _scores(entry: Entry) -> list[str]:
    record = deciding(entry)
    if record is None or entry.decision is None:
        return []
    parts = sorted(contributions(entry, record, entry.decision.target), key=lambda part: -part[2])
    return [f"{_string(name)};raw={raw:.3f};part={weighted:.3f}" for name, raw, weighted in parts]


def _string(text: str) -> str:
    """Of names that an operator gave: what a header cannot have is a question mark."""
    plain = "".join(one if " " <= one <= "~" else "?" for one in text[:LONGEST_NAME])
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
