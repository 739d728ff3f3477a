"""One profile: filter, score, pick."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.core.decision import ProfileResult, ProfileRun, ScoredEndpoint, scored_endpoints
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints, RequestError, Saturated
from proxy.core.plugin import Filter
from proxy.core.request import InferenceRequest
from proxy.scheduling.scoring import Totals

Pick = Callable[[ProfileRun, InferenceRequest, Sequence[ScoredEndpoint]], Sequence[ScoredEndpoint]]
Order = Callable[[ProfileRun, InferenceRequest, Sequence[Endpoint], Sequence[float]], Sequence[Endpoint]]


@dataclass(frozen=True, slots=True)
class FilterStep:
    """`exhausts` is the filter's own word on why it removes endpoints."""

    name: str
    filter: Filter
    exhausts: bool = False


class Steps(NamedTuple):
    """What a run calls: guarded plugins. Each sees the candidates as a tuple, which it cannot change for the others.

    `totals` gives one per endpoint. None of the filters need be called for `spared` endpoints, or
    fewer."""

    filters: Sequence[FilterStep]
    totals: Totals
    pick: Pick
    order: Order
    spared: float = 0


@dataclass(slots=True)
class Profile:
    """Changes nothing observable, so it can run for retries, shadows and dry runs alike. `rounds` has the steps of
    every run, without end: most runs are plain, some are watched."""

    name: str
    rounds: Iterator[Steps]
    shadow: bool = False
    _first_attempt: ProfileRun = field(init=False)

    def __post_init__(self) -> None:
        self._first_attempt = ProfileRun(self.name, 0, self.shadow)

    def run(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> ProfileResult:
        """Raises Saturated or NoEndpoints, naming the profile and the filter that left nothing."""
        run = ProfileRun(self.name, attempt, self.shadow)
        filters, totals, pick, _, _ = next(self.rounds)
        candidates = self._filter(filters, run, request, tuple(endpoints))
        scored = tuple(scored_endpoints(zip(candidates, totals(run, request, candidates), strict=True)))
        return ProfileResult(self.name, tuple(pick(run, request, scored)))

    def order(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> Sequence[Endpoint]:
        """The endpoints of `run`, for whoever does not want their scores: without the objects that these would take, a
        decision among four pods takes 11,000 instructions less. Raises what `run` raises."""
        run = ProfileRun(self.name, attempt, self.shadow) if attempt else self._first_attempt
        filters, totals, _, order, spared = next(self.rounds)
        candidates = tuple(endpoints)
        if not 0 < len(candidates) <= spared:
            candidates = self._filter(filters, run, request, candidates)
        return order(run, request, candidates, totals(run, request, candidates))

    def _filter(
        self,
        filters: Sequence[FilterStep],
        run: ProfileRun,
        request: InferenceRequest,
        endpoints: tuple[Endpoint, ...],
    ) -> tuple[Endpoint, ...]:
        if not endpoints:
            raise NoEndpoints("No pod is ready; try again shortly.")
        for step in filters:
            endpoints = tuple(step.filter.filter(run, request, endpoints))
            if not endpoints:
                raise self._emptied_by(step)
        return endpoints

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
