"""Keep the pods near the pod of an earlier stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.endpoint_data import LEVELS, PEER, distances


@plugin("topology-affinity-filter")
@dataclass(frozen=True, slots=True)
class TopologyAffinityFilter(Filter):
    """Keeps the pods in the same topology domain as the peer (the pod that the request was already assigned to) or in a
    closer one. Keeps all pods if only the peer is in it, and for requests without a peer. Domains are the labels
    kubernetes.io/hostname (or the host of the URL) and topology.kubernetes.io/rack, zone and region."""

    min_affinity: Literal["host", "rack", "zone", "region"] = param("host", "topology domain that must be shared")
    topology_producer_name: str = param(
        "", "accepted and without effect: labels of the pods name their topology domains"
    )

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (PEER,)

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        peer = request.state.read(PEER)
        if peer is None:
            return endpoints
        farthest, far = LEVELS.index(self.min_affinity), distances(peer, endpoints)
        near = [pod for pod, at in zip(endpoints, far, strict=True) if at <= farthest and pod is not peer]
        return near or endpoints
