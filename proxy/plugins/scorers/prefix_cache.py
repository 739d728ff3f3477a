"""Prefer endpoints that hold more of the prompt in their KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.prefix.match import PrefixMatch, reads_prefix_match


@plugin("prefix-cache-scorer")
@dataclass(slots=True)
class PrefixCacheScorer(Scorer):
    """w·L + (1 - w)·ratio with ratio = matched / total blocks, L = min(1, matched tokens / scale)² and w =
    `matchLengthWeight`; 0 for all where nothing is known of the prompt."""

    match_length_weight: float = param(
        0.0, "Share of the matched length in the score; the rest is the matched ratio.", at_least=0, at_most=1
    )
    match_length_scale_tokens: int = param(8192, "Matched tokens that count as a full length.", more_than=0)
    match: DataKey[PrefixMatch] = reads_prefix_match()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        match = request.state.read(self.match)
        if match is None or not match.total:
            return [0.0] * len(endpoints)
        weight, total, matched = self.match_length_weight, match.total, match.matched(endpoints)
        if not weight:
            return [blocks / total for blocks in matched] if any(matched) else [0.0] * len(endpoints)
        scale = self.match_length_scale_tokens
        return [
            weight * min(1.0, tokens / scale) ** 2 + (1.0 - weight) * (blocks / total)
            for blocks, tokens in zip(matched, match.lengths(endpoints), strict=True)
        ]
