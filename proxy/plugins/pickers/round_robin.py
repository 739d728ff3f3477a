"""Pick one pod after the other, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.attempt import Attempt
from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import EndpointRemoved, Picker, PreRequest, plugin
from proxy.core.request import InferenceRequest
from proxy.core.state import PluginState


@plugin("round-robin-picker")
@dataclass
class RoundRobinPicker(Picker, PreRequest, EndpointRemoved):
    """Smooth weighted round robin, as in nginx: every candidate gains its weight, the one with the highest sum is
    picked and loses the sum of all weights. Scores are ignored. The position advances when a request is sent."""

    state: PluginState
    max_num_of_endpoints: int = param(0, "only 0: a round counts the turns of every candidate of a decision")

    def __post_init__(self) -> None:
        if self.max_num_of_endpoints != 0:
            raise ValueError(
                "maxNumOfEndpoints: round robin counts the turns of every candidate, so a decision names all of them; "
                "remove it, or use another picker"
            )
        self._credit: dict[Endpoint, float] = self.state.get("credit", dict)

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        return sorted(scored, key=lambda one: (-self._next_credit(one.endpoint), one.endpoint.name))

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        """Advance the position. Requests of other profiles count too; no credit exceeds one round, so they shift it by
        one round at most."""
        if attempt.number or not attempt.decision.fallbacks:
            return
        candidates = list(attempt.decision.candidates())
        total = sum(candidate.weight for candidate in candidates)
        for candidate in candidates:
            spent = total if candidate is endpoint else 0.0
            self._credit[candidate] = max(-total, min(total, self._next_credit(candidate) - spent))

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._credit.pop(endpoint, None)

    def _next_credit(self, endpoint: Endpoint) -> float:
        return self._credit.get(endpoint, 0.0) + endpoint.weight
