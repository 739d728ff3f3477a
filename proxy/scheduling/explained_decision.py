"""Explained decisions: the inputs of one decision and its result, as an entry, as JSON and as a response header."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.decision import Decision, ProfileRecord
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, LoadView
from proxy.core.errors import Reason, RequestError
from proxy.core.ports import Clock
from proxy.core.request import DataKey, InferenceRequest
from proxy.flowcontrol import TICKET
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, most_cached
from proxy.scheduling.build import Scheduling

PLAIN_BYTES, BYTES_PER_POD, BYTES_PER_SCORE = 4096, 320, 8
"""Approximate memory of an entry: its own, for each candidate, and for each number of a table."""

IN_FLIGHT = "in-flight"
"""Outcome of a request that has not ended."""


class EndedAttempt(NamedTuple):
    """The fields of an attempt that an entry keeps; the attempt itself has the body of its request."""

    endpoint: Endpoint
    stage: Stage
    number: int
    for_client: bool
    started_at: float
    first_byte_at: float | None
    last_byte_at: float | None
    status: int | None
    ending: Ending | None
    usage: Usage | None
    predicted_cached_tokens: int | None
    cached_to_report: int | None


_SITUATION: Callable[[Endpoint], tuple[LoadView, int, int, Freshness]] = attrgetter(
    "view", "load.requests", "load.tokens", "metrics.freshness"
)


@dataclass(slots=True, eq=False)
class DecisionEntry:
    """One decision. It contains names and lengths of the request, but no prompt, header or body. `situations` (view,
    requests and tokens in flight, freshness), `hits` (tokens of the prompt in the KV cache) and `ttfts` are in the
    order of `candidates`; the latter two are None without a prediction. Times are monotonic seconds, except `at`, which
    is seconds since the epoch."""

    id: str
    request: str
    at: float
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
    is_requested: bool
    """Whether the client requested the explanation."""
    candidates: tuple[Endpoint, ...]
    situations: tuple[tuple[LoadView, int, int, Freshness], ...]
    hits: Sequence[int] | None
    ttfts: Sequence[float] | None
    absent: tuple[dict[str, str], ...]
    """The other pods of the pool, each with the reason."""
    runs: tuple[ProfileRecord, ...]
    shares: Mapping[str, Mapping[str, tuple[float, float]]]
    decision: Decision | None
    error: dict[str, str] | None
    bytes: int
    ended_as: Ending | Reason | None = None
    attempts: list[Attempt | EndedAttempt] = field(default_factory=list)
    status: int | None = None
    ended_at: float | None = None
    is_kept: bool = False

    @property
    def run(self) -> ProfileRecord | None:
        """The run of the profile that chose the target."""
        return next((run for run in self.runs if self.decision and run.profile == self.decision.profile), None)

    @property
    def last(self) -> Attempt | EndedAttempt | None:
        """The latest attempt for the client; of two hedged attempts, the one whose response the client got."""
        attempts = [attempt for attempt in self.attempts if attempt.for_client]
        started = [one for one in attempts if one.ending is not Ending.EVICTED and one.first_byte_at is not None]
        return (started or attempts)[-1] if attempts else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's head to the first byte of the response."""
        last = self.last
        return None if last is None or last.first_byte_at is None else last.first_byte_at - self.received_at

    @property
    def outcome(self) -> str:
        return IN_FLIGHT if self.ended_as is None else self.ended_as.value

    @property
    def prompt_pod(self) -> Endpoint | None:
        """The pod that was chosen for prefill."""
        if self.decision is None:
            return None
        return self.decision.prefill[0] if self.decision.prefill else self.decision.target

    def is_slower_than(self, seconds: float, now: float) -> bool:
        """Return whether the first byte took longer, or is missing for longer."""
        ttft = self.ttft
        if ttft is None:
            ttft = (now if self.ended_at is None else self.ended_at) - self.received_at
        return ttft > seconds

    def predicted_hit(self, pod: Endpoint) -> int | None:
        """Return the prompt tokens that the pod has cached: by the index, and at most what its engine can have."""
        if self.hits is None or pod not in self.candidates:
            return None
        hit = self.hits[self.candidates.index(pod)]
        return min(hit, most_cached(self.prompt_tokens, pod.metrics.block_size))

    def predicted_ttft(self, pod: Endpoint) -> float | None:
        if self.ttfts is None or pod not in self.candidates:
            return None
        return self.ttfts[self.candidates.index(pod)]


ENTRY: DataKey[DecisionEntry] = DataKey("DecisionEntry")


class EntryBuilder:
    """Builds the entries of the decisions of one scheduling. `pods` returns all pods of the pool."""

    def __init__(self, scheduling: Scheduling, pool: str, pods: Callable[[], Sequence[Endpoint]], clock: Clock) -> None:
        self._pool = pool
        self._pods = pods
        self._clock = clock
        self._shares = scheduling.shares()

    def entry(
        self,
        id: str,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        runs: tuple[ProfileRecord, ...],
        outcome: Decision | RequestError,
        is_requested: bool = False,
    ) -> DecisionEntry:
        """Return the entry of a decision. Call it in the tick of the decision, before the reservation, so that it has
        the same data as the plugins."""
        state, error = request.state, outcome if isinstance(outcome, RequestError) else None
        ticket, match, forecast = state.read(TICKET), state.read(PREFIX_MATCH), state.read(LATENCY)
        texts = len(request.id) + len(request.model) + len(request.path)
        columns = sum(len(run.scored) * (len(run.scores) + 4) for run in runs)
        return DecisionEntry(
            id=id,
            request=request.id,
            at=self._clock.wall(),
            pool=self._pool,
            model=request.model,
            path=request.path,
            tenant=request.tenant,
            priority=request.priority,
            stream=request.stream,
            prompt_tokens=(state.read(TOKENIZED_PROMPT) or request.prompt).tokens,
            received_at=request.received_at,
            decided_at=self._clock.now(),
            queued_since=None if ticket is None else ticket.entry.since,
            is_requested=is_requested,
            candidates=tuple(candidates),
            situations=tuple(map(_SITUATION, candidates)),
            hits=array("q", match.lengths(candidates)) if match is not None and candidates else None,
            ttfts=array("d", forecast.ttfts(candidates)) if forecast is not None and candidates else None,
            absent=self._absent(request, candidates),
            runs=runs,
            shares=self._shares,
            decision=None if isinstance(outcome, RequestError) else outcome,
            error=None if error is None else {"type": error.type, "message": error.message},
            bytes=PLAIN_BYTES + texts + len(candidates) * BYTES_PER_POD + columns * BYTES_PER_SCORE,
            ended_as=None if error is None else error.reason,
        )

    def _absent(self, request: InferenceRequest, candidates: Sequence[Endpoint]) -> tuple[dict[str, str], ...]:
        pods = self._pods()
        if len(pods) == len(candidates):
            return ()
        present = set(candidates)
        return tuple({"pod": pod.name, "why": _absence(pod, request.model)} for pod in pods if pod not in present)


def _absence(pod: Endpoint, model: str) -> str:
    if pod.state is not EndpointState.READY:
        return "asleep" if pod.metrics.sleep_level and pod.state is EndpointState.EJECTED else pod.state.value
    return "model" if pod.models and model and model not in pod.models else "narrowed"


def margin(run: ProfileRecord | None, chosen: Endpoint | None) -> tuple[Endpoint, float] | None:
    """Return the best other pod, and by how much the total of the chosen one exceeds it: negative if the picker did not
    choose the best pod. None for a sole candidate, and without scores."""
    if run is None or chosen is None:
        return None
    totals = dict(zip(run.scored, run.totals, strict=True))
    others = [pod for pod in (*run.ranked, *run.scored) if pod is not chosen]
    if chosen not in totals or not others:
        return None
    other = max(others, key=totals.__getitem__)
    return other, totals[chosen] - totals[other]


def short(entry: DecisionEntry) -> dict[str, Any]:
    """Return the choice, its margin, the predictions and the result, ready for JSON."""
    decision, last, pod = entry.decision, entry.last, entry.prompt_pod
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
        "profile": decision.profile if decision else "",
        "pod": decision.target.name if decision else None,
        "prefill": decision.prefill[0].name if decision and decision.prefill else None,
        "why": decision.split_outcome if decision else "",
        "candidates": len(entry.candidates),
        **_margin(entry.run, decision.target if decision else None),
        "promptTokens": entry.prompt_tokens,
        "predicted": {
            "ttft": None if pod is None else _number(entry.predicted_ttft(pod)),
            "cachedTokens": None if pod is None else entry.predicted_hit(pod),
        },
        "waited": _number(entry.decided_at - entry.received_at),
        "queued": _difference(entry.decided_at, entry.queued_since),
        "asked": entry.is_requested,
        "outcome": entry.outcome,
        "status": entry.status,
        "answeredBy": None if last is None or last.first_byte_at is None else last.endpoint.name,
        "ttft": _number(entry.ttft),
        "e2e": _difference(entry.ended_at, entry.received_at),
        "cachedTokens": _cached_tokens(last),
        "tries": sum(attempt.for_client for attempt in entry.attempts),
    }


def whole(entry: DecisionEntry) -> dict[str, Any]:
    """Return the same as `short`, with all candidates, profiles and attempts."""
    return {
        **short(entry),
        "pods": [
            {
                "pod": pod.name,
                "view": {"waiting": view.waiting, "running": view.running, "kvUsage": _number(view.kv_usage)},
                "load": {"requests": requests, "tokens": tokens},
                "fresh": freshness is Freshness.FRESH,
                "hitTokens": entry.predicted_hit(pod),
                "ttft": _number(entry.predicted_ttft(pod)),
            }
            for pod, (view, requests, tokens, freshness) in zip(entry.candidates, entry.situations, strict=True)
        ],
        "absent": list(entry.absent),
        "profiles": [_profile(entry, run) for run in entry.runs],
        "decision": _decision(entry.decision),
        "error": entry.error,
        "legs": [_attempt(attempt, entry.received_at) for attempt in entry.attempts],
    }


_SENT_ONLY = (
    "id", "request", "asked", "waited", "queued", "outcome", "status", "answeredBy", "ttft", "e2e", "cachedTokens",
    "tries", "legs",
)  # fmt: skip


def imagined(entry: DecisionEntry) -> dict[str, Any]:
    """Return the same for a hypothetical request, which has no result."""
    return {key: value for key, value in whole(entry).items() if key not in _SENT_ONLY}


def _cached_tokens(last: Attempt | EndedAttempt | None) -> int | None:
    """Return the cached tokens that the prefill pod reported."""
    if last is None:
        return None
    if last.stage is Stage.DECODE:
        return last.cached_to_report
    return last.usage.cached_tokens if last.usage is not None else None


def _profile(entry: DecisionEntry, run: ProfileRecord) -> dict[str, Any]:
    names, shares = [pod.name for pod in run.scored], entry.shares[run.profile]
    picked = run.ranked[0] if run.ranked else None
    if entry.decision is not None and entry.decision.profile == run.profile:
        picked = entry.decision.target
    return {
        "profile": run.profile,
        "shadow": run.shadow,
        "filters": [{"name": name, "removed": removed} for name, removed in run.filters.items()],
        "scorers": [_scorer(name, *shares[name], names, scores) for name, scores in run.scores.items()],
        "totals": dict(zip(names, map(_number, run.totals), strict=True)),
        "ranked": [pod.name for pod in run.ranked],
        "picked": None if picked is None else picked.name,
        **_margin(run, picked),
    }


def _margin(run: ProfileRecord | None, picked: Endpoint | None) -> dict[str, Any]:
    found = margin(run, picked)
    return {"runnerUp": found and found[0].name, "margin": found and _number(found[1])}


def _scorer(name: str, weight: float, share: float, pods: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    table = {
        pod: {"raw": _number(score), "weighted": _number(score * share)}
        for pod, score in zip(pods, scores, strict=True)
    }
    return {"name": name, "weight": weight, "share": _number(share), "scores": table}


def _decision(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    stages = {"fallbacks": decision.fallbacks, "prefill": decision.prefill, "encode": decision.encode}
    names = {stage: [pod.name for pod in pods] for stage, pods in stages.items()}
    return {"target": decision.target.name, **names, "why": decision.split_outcome}


def _attempt(attempt: Attempt | EndedAttempt, received_at: float) -> dict[str, Any]:
    usage = attempt.usage
    return {
        "stage": attempt.stage.value,
        "pod": attempt.endpoint.name,
        "attempt": attempt.number,
        "forClient": attempt.for_client,
        "sent": _difference(attempt.started_at, received_at),
        "firstByte": _difference(attempt.first_byte_at, received_at),
        "lastByte": _difference(attempt.last_byte_at, received_at),
        "status": attempt.status,
        "ending": None if attempt.ending is None else attempt.ending.value,
        "promptTokens": None if usage is None else usage.prompt_tokens,
        "completionTokens": None if usage is None else usage.completion_tokens,
        "cachedTokens": None if usage is None else usage.cached_tokens,
        "predictedCachedTokens": attempt.predicted_cached_tokens,
    }


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else _number(later - earlier)


def _number(value: float | None) -> float | None:
    """Return a number for JSON, which has neither NaN nor infinity."""
    return round(value, 6) if value is not None and math.isfinite(value) else None


HEADER = "x-kvlane-decision"

MOST_CHARACTERS = 1000
LONGEST_NAME = 100


def summary(entry: DecisionEntry, pod: Endpoint) -> str:
    """Return the value of the response header: ASCII, less than 1 KiB. `pod` is the pod of the attempt. Scorers are in
    the order of their part of the total; the last ones are left out if they do not fit."""
    fields, scores = list(_fields(entry, pod)), _scores(entry)
    while True:
        value = ", ".join([*fields, *([f"scores=({' '.join(scores)})"] if scores else [])])
        if not scores or len(value) <= MOST_CHARACTERS:
            return value
        scores.pop()


def _fields(entry: DecisionEntry, pod: Endpoint) -> Iterator[str]:
    decision, prompt_pod = entry.decision, entry.prompt_pod
    if decision is None or prompt_pod is None:
        return
    yield f"id={_string(entry.id)}"
    yield f"pod={_string(decision.target.name)}"
    if pod is not decision.target:
        yield f"sent-to={_string(pod.name)}"
    if decision.prefill:
        yield f"prefill={_string(prompt_pod.name)}"
    yield f"pool={_string(entry.pool)}"
    yield f"profile={_string(decision.profile)}"
    yield f"candidates={len(entry.candidates)}"
    if (found := margin(entry.run, decision.target)) is not None:
        yield f"margin={found[1]:.3f}"
        yield f"runner-up={_string(found[0].name)}"
    yield f"prompt={entry.prompt_tokens}"
    if (hit := entry.predicted_hit(prompt_pod)) is not None:
        yield f"hit={hit}"
    if (ttft := entry.predicted_ttft(prompt_pod)) is not None:
        yield f"ttft={ttft:.3f}"
    yield f"waited={entry.decided_at - entry.received_at:.3f}"


def _scores(entry: DecisionEntry) -> list[str]:
    run = entry.run
    if run is None or entry.decision is None or entry.decision.target not in run.scored:
        return []
    at, shares = run.scored.index(entry.decision.target), entry.shares[run.profile]
    parts = [(name, scores[at], scores[at] * shares[name][1]) for name, scores in run.scores.items()]
    parts.sort(key=lambda part: -part[2])
    return [f"{_string(name)};raw={raw:.3f};part={weighted:.3f}" for name, raw, weighted in parts]


def _string(text: str) -> str:
    """Return a quoted string of a header; characters that a header cannot have become question marks."""
    plain = "".join(one if " " <= one <= "~" else "?" for one in text[:LONGEST_NAME])
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
