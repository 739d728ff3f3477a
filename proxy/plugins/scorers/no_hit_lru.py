"""Spread prompts without a cache hit: the endpoint that got such a prompt longest ago comes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.attempt import Attempt
from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import EndpointRemoved, PreRequest, Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.core.state import PluginState
from proxy.prefix.match import PrefixMatch, reads_prefix_match

DEFAULT_SIZE = 1024

UNUSED = "accepted and without effect: matches come from a producer, see prefixMatchInfoProducerName"


@plugin("no-hit-lru-scorer")
@dataclass
class NoHitLruScorer(Scorer, PreRequest, EndpointRemoved):
    """0.5 for all n endpoints if one of them has a hit. Otherwise endpoints that never got a cold prompt score
    1 - i/(n-1) in their order, the others 1 - (never used + position among them, oldest 0)/(n-1)."""

    state: PluginState
    lru_size: int = param(DEFAULT_SIZE, f"number of pods to remember; not above 0: {DEFAULT_SIZE}")
    prefix_plugin_type: str = param("", UNUSED)
    prefix_plugin_name: str = param("", UNUSED)
    match: DataKey[PrefixMatch] = reads_prefix_match()

    def __post_init__(self) -> None:
        self._lru: OrderedDict[Endpoint, None] = self.state.get("lru", OrderedDict)

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        if self._is_warm(request, endpoints):
            return [0.5] * len(endpoints)
        if len(endpoints) == 1:
            return [1.0]
        return self._cold_scores(endpoints)

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        if self._is_warm(attempt.request, list(attempt.decision.candidates())):
            return
        self._lru[endpoint] = None
        self._lru.move_to_end(endpoint)
        if len(self._lru) > (self.lru_size if self.lru_size > 0 else DEFAULT_SIZE):
            self._lru.popitem(last=False)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._lru.pop(endpoint, None)

    def _is_warm(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> bool:
        match = request.state.read(self.match)
        return match is not None and any(match.matched(endpoints))

    def _cold_scores(self, endpoints: Sequence[Endpoint]) -> list[float]:
        used = [endpoint for endpoint in self._lru if endpoint in endpoints]  # pods of other stages may be between
        positions = {endpoint: position for position, endpoint in enumerate(used)}
        fresh = len(endpoints) - len(used)
        ranks: list[int] = []
        seen = 0
        for endpoint in endpoints:
            position = positions.get(endpoint)
            if position is None:
                ranks.append(seen)
                seen += 1
            else:
                ranks.append(fresh + position)
        return [1.0 - rank / (len(endpoints) - 1) for rank in ranks]
