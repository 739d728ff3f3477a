"""Pick a random pod, with a probability proportional to its score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.params import param
from proxy.core.plugin import Picker, plugin
from proxy.core.ports import Random
from proxy.core.request import InferenceRequest
from proxy.plugins.weighted_order import weighted_order


@plugin("weighted-random-picker")
@dataclass(frozen=True, slots=True)
class WeightedRandomPicker(Picker):
    """Picks a random pod. The probability of a pod is proportional to its score times its weight, or to its weight if
    all scores are 0."""

    random: Random
    max_num_of_endpoints: int = param(
        0,
        "most pods that a decision names, the chosen one included; 0 or less: all. Retries are not limited",
    )

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        scored_any = any(one.score > 0 for one in scored)
        weights = [one.endpoint.weight * (one.score if scored_any else 1.0) for one in scored]
        return weighted_order(scored, weights, self.random)[: max(0, self.max_num_of_endpoints) or None]
