"""Prefer pods with fewer prompt tokens to prefill, including this request's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.endpoint_data import reads_load
from proxy.prefix.match import PREFIX_MATCH

DEFAULT_THRESHOLD = 4_194_304


@plugin("token-load-scorer")
@dataclass(frozen=True, slots=True)
class TokenLoadScorer(Scorer):
    """1 - min(tokens, threshold) / threshold, where tokens are in flight on the pod or of this prompt
    that the pod does not have cached, in whole blocks; the whole prompt where nothing is known of the cache."""

    uses: ClassVar[tuple[DataKey[Any], ...]] = (PREFIX_MATCH,)
    queue_threshold_tokens: int = param(
        DEFAULT_THRESHOLD, f"tokens at which the score is 0; not above 0: {DEFAULT_THRESHOLD}"
    )
    non_text_token_weight: float = param(1.0, "accepted and without effect: tokens of media count as tokens of text")
    load: DataKey[int] = reads_load()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        threshold = self.queue_threshold_tokens if self.queue_threshold_tokens > 0 else DEFAULT_THRESHOLD
        prompt_tokens, match = request.prompt.tokens, request.state.read(PREFIX_MATCH)
        missing = match.missing(endpoints, prompt_tokens) if match else [prompt_tokens] * len(endpoints)
        tokens = map(int.__add__, missing, (endpoint.load.tokens for endpoint in endpoints))
        return [1.0 - min(count, threshold) / threshold for count in tokens]
