"""Drain affinity: requests for a prefix that a draining pod caches go to one successor, which computes it once."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch

PREFILL_RATE = 10_000.0
"""Approximate prompt tokens that a pod computes per second, which converts a prefix into seconds."""

REQUEST_TOKENS = 512
"""Tokens that one running or waiting request counts as, without a prediction."""


def steer(request: InferenceRequest, decision: Decision, draining: Sequence[Endpoint]) -> Decision:
    """Return the decision, or the same with another of its candidates first. Called only while pods drain.

    A request whose prefix a draining pod has, and the chosen one has not, goes to the candidate that has most of it, or
    is just computing it, unless that one is behind by more than what it has is worth. That the request itself is spared
    is in the decision; this is for the requests that come after it, and would find the prefix on two pods half as
    often."""
    match = request.state.read(PREFIX_MATCH)
    if match is None or not match.total:
        return decision
    pods, target = decision.candidates(), decision.target
    held = dict(zip(pods, match.matched(pods), strict=True))
    successor = max(pods, key=held.__getitem__)
    saved = (min(held[successor], max(match.matched(draining))) - held[target]) * match.block_size
    if saved <= 0 or not _is_near(request, match, successor, target, saved):
        return decision
    return decision._replace(target=successor, fallbacks=tuple(pod for pod in pods if pod is not successor))


def _is_near(request: InferenceRequest, match: PrefixMatch, successor: Endpoint, target: Endpoint, tokens: int) -> bool:
    """Return whether the successor is behind the target by at most the time of this many prompt tokens."""
    forecast = request.state.read(LATENCY)
    if forecast is not None:
        its, chosen = forecast.costs((successor, target))
        return its - chosen <= tokens / PREFILL_RATE
    prompt = (request.state.read(TOKENIZED_PROMPT) or request.prompt).tokens
    its, chosen = (
        pod.load.tokens + missing + REQUEST_TOKENS * (pod.view.waiting + pod.view.running)
        for pod, missing in zip((successor, target), match.missing((successor, target), prompt), strict=True)
    )
    return its - chosen <= tokens
