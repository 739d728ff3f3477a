"""Pick a random pod, independently of its score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.params import param
from proxy.core.plugin import Picker, plugin
from proxy.core.ports import Random
from proxy.core.request import InferenceRequest
from proxy.plugins.weighted_order import weighted_order


@plugin("random-picker")
@dataclass(frozen=True, slots=True)
class RandomPicker(Picker):
    """Picks a random pod. The probability of a pod is proportional to its weight."""

    random: Random
    max_num_of_endpoints: int = param(
        0,
        "most pods that a decision names, the chosen one included; 0 or less: all. Retries are not limited",
    )

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        ordered = weighted_order(scored, [one.endpoint.weight for one in scored], self.random)
        return ordered[: max(0, self.max_num_of_endpoints) or None]
