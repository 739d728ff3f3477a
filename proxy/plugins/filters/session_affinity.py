"""Keep the pod of the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Filter, plugin
from proxy.core.request import InferenceRequest
from proxy.plugins.sessions import SessionAffinity


@plugin("session-affinity-filter")
@dataclass
class SessionAffinityFilter(SessionAffinity, Filter):
    """Keeps the session's pod alone if it is a candidate, else all. See session-affinity-scorer for the strategies and
    `rebalance`."""

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        bound = self.bound(request, endpoints)
        return endpoints if bound is None else [bound]
