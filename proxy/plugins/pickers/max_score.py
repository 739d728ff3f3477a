"""Pick the pod with the highest score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Picker, plugin
from proxy.core.ports import Random
from proxy.core.request import InferenceRequest
from proxy.plugins.weighted_order import weighted_draw


@plugin("max-score-picker")
@dataclass(frozen=True, slots=True)
class MaxScorePicker(Picker):
    """Picks the pod with the highest score. Ties go to the pod with the fewest requests in flight per unit of weight,
    then to the one with the least recent work, then at random by weight."""

    random: Random
    max_num_of_endpoints: int = param(
        0,
        "most pods that a decision names, the chosen one included; 0 or less: all. Retries are not limited",
    )

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        scores = {one.endpoint: one for one in scored}
        ordered = self.order(run, request, list(scores), [one.score for one in scored])
        return [scores[endpoint] for endpoint in ordered]

    def order(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> list[Endpoint]:
        ranks = []
        for at, endpoint in enumerate(endpoints):
            load = endpoint.load
            ranks.append((-scores[at], load.crowding, load.recent, at))
        ranks.sort()
        ordered, before = [], None
        for _, _, recent, at in ranks:  # for four pods, half the price of an `itemgetter` that is mapped
            if recent == before:
                return self._drawn(endpoints, scores)
            before = recent
            ordered.append(endpoints[at])
        if self.max_num_of_endpoints > 0:
            del ordered[self.max_num_of_endpoints :]
        return ordered

    def _drawn(self, endpoints: Sequence[Endpoint], scores: Sequence[float]) -> list[Endpoint]:
        """Draw among pods with equal scores."""
        ranks = []
        for at, (endpoint, score) in enumerate(zip(endpoints, scores, strict=True)):
            load, draw = endpoint.load, weighted_draw(endpoint.weight, self.random)
            ranks.append((-score, load.crowding, load.recent, draw, at, endpoint))
        return [rank[-1] for rank in sorted(ranks)[: max(0, self.max_num_of_endpoints) or None]]
