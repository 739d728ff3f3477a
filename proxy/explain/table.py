"""A decision as JSON: in short for a list, and as the whole table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.record import ProfileRecord
from proxy.explain.entry import Entry, Leg, Situation
from proxy.explain.margin import deciding, margin
from proxy.prefix.keys import most_cached

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
