"""Token and prefix cache counters of the pods, as scraped, and their growth over the whole fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from proxy.core.endpoint import Endpoint, Freshness

_WITHOUT_PROMPTS = ("decode", "encode")
_WITHOUT_ANSWERS = ("prefill", "encode", "encode-prefill")
"""Roles whose pods see the tokens of a request that a pod of another role counts too."""


class EngineCounters(NamedTuple):
    """Totals of one pod since its engine started; None if the pod does not report them or another pod counts them."""

    prompt: float | None
    generation: float | None
    queries: float | None
    hits: float | None
    is_silent: bool
    """The pod has requests and does not report their tokens."""


class Growth(NamedTuple):
    """Increase of the counters of all pods; None if it is not known."""

    prompt: float | None = None
    generation: float | None = None
    queries: float | None = None
    hits: float | None = None


def counters_of(endpoints: Iterable[Endpoint]) -> dict[str, EngineCounters]:
    """Return the counters by the name of the pod. Pods with stale metrics are left out."""
    return {one.name: _counters(one) for one in endpoints if one.metrics.freshness is Freshness.FRESH}


def growth(before: Mapping[str, EngineCounters], now: Mapping[str, EngineCounters]) -> Growth:
    """A pod that joined or restarted counts from its second sample on. Tokens are not known as long as a pod is silent
    about them: the sum of the others would be too low."""
    pods = [(before[name], counters) for name, counters in now.items() if name in before]
    pods = [(was, counters) for was, counters in pods if not _has_restarted(was, counters)]
    known = Growth(*(_sum((was[at], counters[at]) for was, counters in pods) for at in range(len(Growth._fields))))
    if any(counters.is_silent for counters in now.values()):
        return known._replace(prompt=None, generation=None)
    return known


def _counters(endpoint: Endpoint) -> EngineCounters:
    metrics, role = endpoint.metrics, endpoint.role
    has_prompts, has_answers = role not in _WITHOUT_PROMPTS, role not in _WITHOUT_ANSWERS
    prompt, generation = metrics.prompt_tokens, metrics.generation_tokens
    return EngineCounters(
        prompt if has_prompts and prompt >= 0 else None,
        generation if has_answers and generation >= 0 else None,
        metrics.prefix_queries if has_prompts else None,
        metrics.prefix_hits if has_prompts else None,
        metrics.running > 0 and ((has_prompts and prompt < 0) or (has_answers and generation < 0)),
    )


def _has_restarted(before: EngineCounters, now: EngineCounters) -> bool:
    return any(was is not None and at is not None and at < was for was, at in zip(before[:4], now[:4], strict=True))


def _sum(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    grown = [now - was for was, now in pairs if was is not None and now is not None]
    return sum(grown) if grown else None
