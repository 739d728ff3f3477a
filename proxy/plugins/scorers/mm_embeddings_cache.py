"""Prefer endpoints that have encoded more of the request's images, audio and video before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin, reads
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.producers.mm_embeddings_cache import ENCODER_CACHE_MATCH, MediaMatch


@plugin("mm-embeddings-cache-scorer")
@dataclass(slots=True)
class MmEmbeddingsCacheScorer(Scorer):
    """Share of the distinct media of the request that the pod has encoded; 0 for all pods if the request has none."""

    match: DataKey[MediaMatch] = reads(
        ENCODER_CACHE_MATCH, "producerName", "producer whose matches are read; empty: the first one"
    )

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        match = request.state.read(self.match)
        return [0.0] * len(endpoints) if match is None else match.shares(endpoints)
