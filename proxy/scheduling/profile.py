"""One profile: filter, score, pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileResult, ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints, RequestError, Saturated
from proxy.core.plugin import Filter, Picker, Scorer
from proxy.core.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class FilterStep:
    """`exhausts` is the filter's own word on why it removes endpoints."""

    name: str
    filter: Filter
    exhausts: bool = False


@dataclass(frozen=True, slots=True)
class ScorerStep:
    """`share` is the weight divided by the sum of the profile's weights."""

    name: str
    scorer: Scorer
    share: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Changes nothing observable, so it can run for retries, shadows and dry runs alike."""

    name: str
    filters: tuple[FilterStep, ...]
    scorers: tuple[ScorerStep, ...]
    picker: Picker
    shadow: bool = False

    def run(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> ProfileResult:
        """Raises Saturated or NoEndpoints, naming the profile and the filter that left nothing."""
        run = ProfileRun(self.name, attempt, self.shadow)
        survivors = self._filter(run, request, endpoints)
        totals = self._score(run, request, survivors)
        scored = list(map(ScoredEndpoint._make, zip(survivors, totals, strict=True)))
        ranked = tuple(self.picker.pick(run, request, scored))
        if not ranked:
            raise NoEndpoints(f"The picker of profile '{self.name}' picked none of {len(scored)} pods.")
        return ProfileResult(self.name, ranked)

    def _filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if not endpoints:
            raise NoEndpoints("No pod is ready; try again shortly.")
        for step in self.filters:
            endpoints = step.filter.filter(run, request, endpoints)
            if not endpoints:
                raise self._emptied_by(step)
        return endpoints

    def _score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        totals = [0.0] * len(endpoints)
        for step in self.scorers:
            share = step.share
            scores = step.scorer.score(run, request, endpoints)
            totals = [total + share * score for total, score in zip(totals, scores)]  # noqa: B905  # as many: the guard
        return totals

    def _emptied_by(self, step: FilterStep) -> RequestError:
        where = f"filter '{step.name}' of profile '{self.name}' left none"
        if step.exhausts:
            return Saturated(f"All pods are busy: {where}. Try again shortly.")
        return NoEndpoints(f"No pod fits this request: {where}.")


def shares(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum; all 0 if they sum to 0."""
    largest = max(weights, default=0.0)
    if largest == 0.0:
        return [0.0] * len(weights)
    scaled = [weight / largest for weight in weights]
    total = sum(scaled)
    return [weight / total for weight in scaled]
