"""One profile: filter, score, pick."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proxy.core.decision import ProfileResult, ProfileRun, ScoredEndpoint, scored_endpoints
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints, RequestError, Saturated
from proxy.core.plugin import Filter
from proxy.core.record import DecisionRecord
from proxy.core.request import InferenceRequest
from proxy.scheduling.guard import GuardedPicker
from proxy.scheduling.scoring import Scoring, Totals

NO_PODS = "No pod is ready; try again shortly."

Order = Callable[[ProfileRun, InferenceRequest, Sequence[Endpoint], Sequence[float]], Sequence[Endpoint]]


@dataclass(frozen=True, slots=True)
class FilterStep:
    """`exhausts` is the filter's own word on why it removes endpoints."""

    name: str
    filter: Filter
    exhausts: bool = False


@dataclass(slots=True)
class Profile:
    """Guarded plugins in the order in which a run calls them. It changes nothing observable, so it runs for retries,
    shadows and dry runs alike. Plugins see the candidates as a tuple, which they cannot change for each other.

    No filter removes any of `spared` endpoints, or fewer."""

    name: str
    filters: Sequence[FilterStep]
    scoring: Scoring
    picker: GuardedPicker
    shadow: bool = False
    spared: float = 0
    _first_attempt: ProfileRun = field(init=False)
    _totals: Totals = field(init=False)
    _order: Order = field(init=False)
    _unguarded: tuple[Totals, Order] | None = field(init=False, default=None)
    """Score and order of the plugins of a profile that has one scorer and a built-in picker."""

    def __post_init__(self) -> None:
        self._first_attempt = ProfileRun(self.name, 0, self.shadow)
        self._totals, self._order = self.scoring.unguarded(), self.picker.order
        scorer = self.scoring.sole
        if scorer is not None and self.picker.is_trusted:
            self._unguarded = (scorer.unguarded.score, self.picker.unguarded.order)

    def run(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        attempt: int = 0,
        record: DecisionRecord | None = None,
    ) -> ProfileResult:
        """Raises Saturated or NoEndpoints, naming the profile and the filter that left nothing."""
        run = ProfileRun(self.name, attempt, self.shadow)
        if record is not None:
            return self._recorded(run, request, tuple(endpoints), record)
        candidates = self._filter(run, request, tuple(endpoints))
        scored = tuple(scored_endpoints(zip(candidates, self._totals(run, request, candidates), strict=True)))
        return ProfileResult(self.name, tuple(self.picker.pick(run, request, scored)))

    def order(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        attempt: int = 0,
        record: DecisionRecord | None = None,
    ) -> Sequence[Endpoint]:
        """Return the endpoints of `run`, without the objects that their scores take: a decision among four pods takes
        11,000 instructions less. Raises what `run` raises."""
        if record is not None:
            return self.run(request, endpoints, attempt, record).endpoints
        run = ProfileRun(self.name, attempt, self.shadow) if attempt else self._first_attempt
        candidates = tuple(endpoints)
        if not 0 < len(candidates) <= self.spared:
            candidates = self._filter(run, request, candidates)
        if self._unguarded is not None:
            # Without the guards of the scorer and of the picker: 0.9 % of the instructions of a request.
            score, order = self._unguarded
            try:
                scores = score(run, request, candidates)
                for one in scores:
                    if not 0.0 <= one <= 1.0:
                        break
                else:
                    if len(scores) == len(candidates):
                        return order(run, request, candidates, scores)
            except Exception:  # noqa: BLE001, S110  # the guards find out what it was, and report it
                pass
        return self._order(run, request, candidates, self._totals(run, request, candidates))

    def _filter(
        self, run: ProfileRun, request: InferenceRequest, endpoints: tuple[Endpoint, ...]
    ) -> tuple[Endpoint, ...]:
        if not endpoints:
            raise NoEndpoints(NO_PODS)
        for step in self.filters:
            endpoints = tuple(step.filter.filter(run, request, endpoints))
            if not endpoints:
                raise self._emptied_by(step)
        return endpoints

    def _recorded(
        self, run: ProfileRun, request: InferenceRequest, endpoints: tuple[Endpoint, ...], record: DecisionRecord
    ) -> ProfileResult:
        """The same run, step by step."""
        if not endpoints:
            raise NoEndpoints(NO_PODS)
        found, picker = record.profile(run), self.picker
        for step in self.filters:
            kept = record.call("Filter", step.filter, step.name, step.filter.filter, run, request, endpoints)
            found.filtered(step.name, endpoints, kept)
            endpoints = tuple(kept)
            if not endpoints:
                raise self._emptied_by(step)
        columns = []
        for scorer in self.scoring.scorers:
            scores = record.call("Scorer", scorer, scorer.name, scorer.score, run, request, endpoints)
            found.scores[scorer.name] = array("d", scores)
            columns.append(scores)
        scored = tuple(map(ScoredEndpoint, endpoints, self.scoring.added_up(columns, len(endpoints))))
        picked = record.call("Picker", picker, picker.name, picker.pick, run, request, scored)
        found.picked(scored, picked)
        return ProfileResult(self.name, tuple(picked))

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
