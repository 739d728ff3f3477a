"""The best score first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Picker, plugin
from proxy.core.ports import Random
from proxy.core.request import InferenceRequest
from proxy.plugins.weighted_order import weighted_draw

_score = attrgetter("score")


@plugin("max-score-picker")
@dataclass(frozen=True, slots=True)
class MaxScorePicker(Picker):
    """Equal scores: the pod with the least recent work per unit of its weight, then at random by weight, never by
    order."""

    random: Random
    max_num_of_endpoints: int = param(1, "most that are reported to others; retries may use every pod that is left")

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        if len(set(map(_score, scored))) == len(scored):
            return sorted(scored, key=_score, reverse=True)
        ranks: dict[Endpoint, tuple[float, ...]] = {
            one.endpoint: (-one.score, one.endpoint.load.recent) for one in scored
        }
        if len(set(ranks.values())) < len(ranks):
            ranks = {endpoint: (*rank, self._draw(endpoint)) for endpoint, rank in ranks.items()}
        return sorted(scored, key=lambda one: ranks[one.endpoint])

    def _draw(self, endpoint: Endpoint) -> float:
        return weighted_draw(endpoint.weight, self.random)
