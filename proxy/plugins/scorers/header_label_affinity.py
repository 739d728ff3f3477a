"""Prefer pods whose label equals a request header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest


@plugin("header-label-affinity-scorer")
@dataclass(frozen=True, slots=True)
class HeaderLabelAffinityScorer(Scorer):
    """1 where the label equals the header, else 0; 0 for all without the header."""

    header_name: str = param(doc="request header, in upper or lower case")
    label_key: str = param(doc="label of the pods")

    def __post_init__(self) -> None:
        if not self.header_name or not self.label_key:
            raise ValueError("headerName and labelKey must not be empty")

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        wanted = request.headers.get(self.header_name.lower())
        if not wanted:
            return [0.0] * len(endpoints)
        return [1.0 if endpoint.labels.get(self.label_key) == wanted else 0.0 for endpoint in endpoints]
