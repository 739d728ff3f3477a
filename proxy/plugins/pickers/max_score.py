"""The best score first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.params import param
from proxy.core.plugin import Picker, plugin
from proxy.core.ports import Random
from proxy.core.request import InferenceRequest
from proxy.plugins.weighted_order import weighted_draw

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
        ranks, worked = [], set()
        for one in scored:
            load = one[0].load  # by place and in a loop: half the price, for four pods, of names and of `attrgetter`s
            ranks.append((-one[1], load.crowding, load.recent, one))
            worked.add(load.recent)
        if len(worked) < len(scored):
            return self._drawn(scored)
        ranks.sort()
        return list(map(_last, ranks))

    def _drawn(self, scored: Sequence[ScoredEndpoint]) -> list[ScoredEndpoint]:
        """Where some may be equal."""
        ranks = []
        for at, one in enumerate(scored):
            load, draw = one.endpoint.load, weighted_draw(one.endpoint.weight, self.random)
            ranks.append((-one.score, load.crowding, load.recent, draw, at, one))
        return list(map(_last, sorted(ranks)))
