"""The best score first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.params import param
from proxy.core.plugin import Picker, plugin
from proxy.core.ports import Random
from proxy.core.request import InferenceRequest
from proxy.plugins.weighted_order import weighted_draw

_score = itemgetter(1)
_load = attrgetter("endpoint.load.crowding", "endpoint.load.recent")
_last = itemgetter(-1)


@plugin("max-score-picker")
@dataclass(frozen=True, slots=True)
class MaxScorePicker(Picker):
    """Equal scores: the pod with the fewest requests in flight per unit of its weight, then the one with the least
    recent work, then at random by weight, never by order."""

    random: Random
    max_num_of_endpoints: int = param(1, "most that are reported to others; retries may use every pod that is left")

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        if len(set(map(_score, scored))) == len(scored):
            return sorted(scored, key=_score, reverse=True)
        if len(set(map(_load, scored))) == len(scored):  # nothing to draw: 1.2 us for four pods, not 2.1
            return sorted(sorted(scored, key=_load), key=_score, reverse=True)
        ranks = [
            (-one.score, *_load(one), weighted_draw(one.endpoint.weight, self.random), at, one)
            for at, one in enumerate(scored)
        ]
        return list(map(_last, sorted(ranks)))
