"""Prefer endpoints that have encoded more of the request's images, audio and video before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.producers.mm_embeddings_cache import ENCODER_CACHE_MATCH, MediaMatch


@plugin("mm-embeddings-cache-scorer")
@dataclass(slots=True)
class MmEmbeddingsCacheScorer(Scorer):
    """Share of the distinct media of the request that the pod has encoded; 0 for all pods if the request has none."""

    producer_name: str = param("", "producer whose matches are read; empty: the first one")
    _match: DataKey[MediaMatch] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._match = ENCODER_CACHE_MATCH.of(self.producer_name)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (self._match,)

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        match = request.state.read(self._match)
        return [0.0] * len(endpoints) if match is None else match.shares(endpoints)
