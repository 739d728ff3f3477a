"""Prefer the pod of the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest
from proxy.plugins.sessions import SessionAffinity


@plugin("session-affinity-scorer")
@dataclass
class SessionAffinityScorer(SessionAffinity, Scorer):
    """1 for the session's pod, 0 for the others; 0 for all without a session.

    With `encoded_endpoint_header` every response carries a token, base64 of `namespace/name`, that the client sends
    back; with `session_id` the proxy remembers, and moves a session only when its pod is no candidate any more. With
    `rebalance` a session also leaves a pod that is too far behind the others, and is bound to where it goes; sessions
    of a pod that drains go where those before them went, while that pod is not too far behind.
    """

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        bound = self.bound(request, endpoints)
        return [1.0 if endpoint is bound else 0.0 for endpoint in endpoints]
