"""Prefer pods with fewer prompt tokens to prefill, this request's included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.cycle_state import DataKey
from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import OUTPUT_ESTIMATE, InferenceRequest
from proxy.prefix.keys import PREFIX_MATCH

DEFAULT_THRESHOLD = 4_194_304


@plugin("token-load-scorer")
@dataclass(frozen=True, slots=True)
class TokenLoadScorer(Scorer):
    """1 - min(tokens, threshold) / threshold, where tokens are those in flight on the pod and those of this prompt
    that the pod does not have cached, in whole blocks; the whole prompt where nothing is known of the cache."""

    queue_threshold_tokens: int = param(
        DEFAULT_THRESHOLD, f"tokens at which the score is 0; not above 0: {DEFAULT_THRESHOLD}"
    )
    in_flight_load_producer_name: str = param("", "the inflight-load-producer that must be there")

    @property
    def requires(self) -> tuple[DataKey[int], ...]:
        name = self.in_flight_load_producer_name
        return (OUTPUT_ESTIMATE.of(name),) if name else ()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        threshold = self.queue_threshold_tokens if self.queue_threshold_tokens > 0 else DEFAULT_THRESHOLD
        tokens = map(int.__add__, uncached_tokens(request, endpoints), (e.load.tokens for e in endpoints))
        return [1.0 - min(count, threshold) / threshold for count in tokens]


def uncached_tokens(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[int]:
    """(total - matched) blocks, and the tokens of the prompt beyond its blocks."""
    prompt_tokens = request.prompt.tokens
    match = request.state.read(PREFIX_MATCH)
    if match is None:
        return [prompt_tokens] * len(endpoints)
    total, size = match.total, match.block_size
    beyond = max(0, prompt_tokens - total * size)
    return [max(0, total - blocks) * size + beyond for blocks in match.matched(endpoints)]
