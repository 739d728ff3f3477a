"""Prefer pods near the pod of an earlier stage, because transfers between them are faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.endpoint_data import PEER, distances

SCORES = (1.0, 0.2, 0.05, 0.02, 0.0)
"""Scores by the shared level: host, rack, zone, region, none; roughly the relative speed of a transfer."""


@plugin("topology-affinity-scorer")
@dataclass(frozen=True, slots=True)
class TopologyAffinityScorer(Scorer):
    """1 for pods on the host of the peer (the pod that the request was already assigned to), 0.2 in its rack, 0.05
    in its zone, 0.02 in its region, else 0; 0 for all pods without a peer. See topology-affinity-filter for the
    labels."""

    topology_producer_name: str = param(
        "", "accepted and without effect: labels of the pods name their topology domains"
    )

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (PEER,)

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        peer = request.state.read(PEER)
        if peer is None:
            return [0.0] * len(endpoints)
        return [SCORES[at] for at in distances(peer, endpoints)]
