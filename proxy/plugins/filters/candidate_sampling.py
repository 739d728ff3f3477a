"""Score only some pods of a large fleet: the pods with the longest cached prefix, and a random sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.ports import Random
from proxy.core.request import DataKey, InferenceRequest
from proxy.prefix.match import PrefixMatch, reads_prefix_match


@plugin("candidate-sampling-filter")
@dataclass(frozen=True, slots=True)
class CandidateSamplingFilter(Filter):
    """Keeps at most `maxCandidates` pods: up to half of them with more of the prompt than the rest of the fleet,
    longest match first, the others drawn at random. The best of a hundred pods without any of the prompt is about as
    good as the best of a thousand, and takes a twentieth of the time to find."""

    random: Random
    max_candidates: int = param(128, "largest number of pods that are scored", at_least=2)
    match: DataKey[PrefixMatch] = reads_prefix_match()

    @property
    def keeps_up_to(self) -> int:
        return self.max_candidates

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        most = self.max_candidates
        if len(endpoints) <= most:
            return endpoints
        match = request.state.read(self.match)
        ahead = [] if match is None else self._ahead(match.matched(endpoints), most // 2)
        kept = {endpoints[at]: None for at in ahead}
        kept |= self._drawn(endpoints, most - len(ahead))
        return list(kept)

    def _drawn(self, endpoints: Sequence[Endpoint], many: int) -> dict[Endpoint, None]:
        """Draw distinct pods, in a third of the time of `random.sample`."""
        draw, left, drawn = self.random.random, list(endpoints), dict[Endpoint, None]()
        for size in range(len(left), len(left) - many, -1):
            at = int(draw() * size)
            drawn[left[at]] = None
            left[at] = left[size - 1]
        return drawn

    def _ahead(self, matched: Sequence[int], most: int) -> Sequence[int]:
        """Return the indexes of pods that hold more of the prompt than the pod that holds least."""
        least, draw = min(matched), self.random.random
        ahead = [at for at, blocks in enumerate(matched) if blocks > least]
        return ahead if len(ahead) <= most else nsmallest(most, ahead, key=lambda at: (-matched[at], draw()))
