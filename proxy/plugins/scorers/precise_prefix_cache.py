"""The deprecated combination of a precise prefix index and its scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer


@plugin("precise-prefix-cache-scorer")
@dataclass
class PrecisePrefixCacheScorer(PrecisePrefixCacheProducer, Scorer):
    """Share of the prompt's blocks that the pod has; 0 for all where the prompt has no token ids. Deprecated: use
    precise-prefix-cache-producer, whose parameters it has, and prefix-cache-scorer."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        match = request.state.read(self.provides[0])
        if match is None or not match.total:
            return [0.0] * len(endpoints)
        total = match.total
        return [blocks / total for blocks in match.matched(endpoints)]
