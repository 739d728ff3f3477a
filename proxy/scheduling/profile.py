"""A scheduling profile: filter, score, pick. Plugins run behind guards."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Generic, TypeVar

from proxy.core.decision import DecisionRecord, ProfileResult, ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NO_POD, NoEndpoints, RequestError, Saturated
from proxy.core.plugin import Filter, Picker, Plugin, Scorer
from proxy.core.registry import NOT_A_NUMBER, OUT_OF_RANGE, RAISED, UNUSABLE, WRONG_LENGTH, PluginFaults, is_built_in
from proxy.core.request import InferenceRequest

P = TypeVar("P", bound=Plugin)


@dataclass(slots=True)
class Profile:
    """Guarded plugins in the order in which a run calls them. A run changes nothing that a later run reads, except that
    models may learn from what has been observed; so retries, shadows and dry runs use it alike. Plugins receive the
    candidates as a tuple, which they cannot change."""

    name: str
    filters: Sequence[GuardedFilter]
    scorers: Sequence[GuardedScorer]
    shares: tuple[float, ...]
    """The share of each scorer in the total."""
    picker: GuardedPicker
    shadow: bool = False
    _run: ProfileRun = field(init=False)
    _keeps_up_to: int = field(init=False)
    """For this many endpoints or fewer no filter is called, because all filters would keep all."""
    _score: Callable[[ProfileRun, InferenceRequest, tuple[Endpoint, ...]], Sequence[float]] = field(init=False)
    """Returns the totals: the scores of the scorer if there is only one, else the sum of all."""

    def __post_init__(self) -> None:
        self._run = ProfileRun(self.name, self.shadow)
        self._keeps_up_to = min((each.unguarded.keeps_up_to for each in self.filters), default=0)
        self._score = self.scorers[0].score if self.shares == (1.0,) else self._totals

    def run(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        record: DecisionRecord | None = None,
    ) -> ProfileResult:
        """Filter, score and pick. Raise Saturated or NoEndpoints with the profile and the filter that removed the last
        endpoints."""
        run, picker = self._run, self.picker
        candidates = self._filter(run, request, tuple(endpoints), record)
        scored = tuple(map(ScoredEndpoint, candidates, self._totals(run, request, candidates, record)))
        if record is None:
            picked = picker.pick(run, request, scored)
        else:
            picked = record.call("Picker", picker, picker.name, picker.pick, run, request, scored)
            record.profile(run).picked(scored, picked)
        return ProfileResult(self.name, tuple(picked))

    def order(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        record: DecisionRecord | None = None,
    ) -> Sequence[Endpoint]:
        """Return the endpoints of `run` without the objects for its scores (hot path, see docs/notes/cpu.md). Raise as
        `run` does."""
        if record is not None:
            return self.run(request, endpoints, record).endpoints
        run, candidates = self._run, tuple(endpoints)
        if not 0 < len(candidates) <= self._keeps_up_to:
            candidates = self._filter(run, request, candidates)
        return self.picker.order(run, request, candidates, self._score(run, request, candidates))

    def _filter(
        self,
        run: ProfileRun,
        request: InferenceRequest,
        endpoints: tuple[Endpoint, ...],
        record: DecisionRecord | None = None,
    ) -> tuple[Endpoint, ...]:
        if not endpoints:
            raise NoEndpoints(NO_POD)
        for each in self.filters:
            if record is None:
                kept = tuple(each.filter(run, request, endpoints))
            else:
                found = record.profile(run)
                kept = tuple(record.call("Filter", each, each.name, each.filter, run, request, endpoints))
                found.filtered(each.name, endpoints, kept)
            if not kept:
                where = f"filter '{each.name}' of profile '{self.name}' left none"
                if each.unguarded.exhausts:
                    raise Saturated(f"All pods are busy: {where}. Try again shortly.")
                raise NoEndpoints(f"No pod fits this request: {where}.")
            endpoints = kept
        return endpoints

    def _totals(
        self,
        run: ProfileRun,
        request: InferenceRequest,
        endpoints: tuple[Endpoint, ...],
        record: DecisionRecord | None = None,
    ) -> Sequence[float]:
        """Return the sum of share times score per endpoint."""
        totals = [0.0] * len(endpoints)
        for scorer, share in zip(self.scorers, self.shares, strict=True):
            if record is None:
                scores = scorer.score(run, request, endpoints)
            else:
                scores = record.call("Scorer", scorer, scorer.name, scorer.score, run, request, endpoints)
                record.profile(run).scores[scorer.name] = array("d", scores)
            totals = [total + share * score for total, score in zip(totals, scores, strict=True)]
        return totals


def shares(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum; all 0 if they sum to 0."""
    largest = max(weights, default=0.0)
    if largest == 0.0:
        return [0.0] * len(weights)
    scaled = [weight / largest for weight in weights]
    total = sum(scaled)
    return [weight / total for weight in scaled]


class _Guard(Plugin, Generic[P]):
    """Stands for a plugin, and reports its faults under its name in the configuration. Results of built-in filters
    and pickers are trusted."""

    def __init__(self, plugin: P, name: str, faults: PluginFaults) -> None:
        self.plugin_type = plugin.plugin_type  # type: ignore[misc]
        self.unguarded = plugin
        self.name = name
        self.is_trusted = is_built_in(plugin)
        self.fault = partial(faults.report, name)


class GuardedScorer(_Guard[Scorer], Scorer):
    """A scorer whose scores are clamped to [0, 1]; NaN becomes 0. If the scorer fails, all scores are 0."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        try:
            scores = self.unguarded.score(run, request, endpoints)
            if len(scores) != len(endpoints):
                self.fault(WRONG_LENGTH, f"gave {len(scores)} scores for {len(endpoints)} pods; each scores 0")
                return [0.0] * len(endpoints)
            for score in scores:
                if not 0.0 <= score <= 1.0:  # as is NaN
                    return self._repair(scores)
            return scores
        except Exception as error:  # noqa: BLE001  # whatever it is, the cycle goes on
            self.fault(RAISED, "failed; each pod scores 0", error)
            return [0.0] * len(endpoints)

    def _repair(self, scores: Sequence[float]) -> list[float]:
        if any(score != score for score in scores):
            self.fault(NOT_A_NUMBER, "gave NaN, which counts as 0")
        if any(score < 0.0 or score > 1.0 for score in scores):
            self.fault(OUT_OF_RANGE, f"gave scores outside [0, 1], which are clamped: {min(scores)} to {max(scores)}")
        return [min(1.0, max(0.0, score)) if score == score else 0.0 for score in scores]


class GuardedFilter(_Guard[Filter], Filter):
    """A filter that is skipped if it fails; non-candidates and duplicates are removed from its result. A RequestError
    passes: a filter refuses a request by it."""

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        try:
            kept = self.unguarded.filter(run, request, endpoints)
            if kept is endpoints:
                return kept
            kept = tuple(kept)
            if self.is_trusted or _are_distinct(kept, endpoints):
                return kept
            repaired = tuple(dict.fromkeys(one for one in kept if one in endpoints))
        except RequestError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self.fault(RAISED, "failed; the filter is skipped", error)
            return endpoints
        if not repaired:
            self.fault(UNUSABLE, "kept only what is not a candidate; the filter is skipped")
            return endpoints
        self.fault(UNUSABLE, "kept pods twice or pods that are not candidates; these are dropped")
        return repaired


class GuardedPicker(_Guard[Picker], Picker):
    """A picker that is replaced by best-score-first if it fails, picks no endpoint, or picks a non-candidate. The
    result of a built-in picker is not checked: the check takes 0.8 % of the instructions of a request of 1 KB (`python
    bench/instructions.py --still`)."""

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> Sequence[ScoredEndpoint]:
        try:
            picked = tuple(self.unguarded.pick(run, request, scored))
            if self.is_trusted or self._is_usable(tuple(map(_endpoint, picked)), list(map(_endpoint, scored))):
                return picked
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self.fault(RAISED, _FAILED, error)
        return _best_first(scored)

    def order(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        try:
            ordered = self.unguarded.order(run, request, endpoints, scores)
            if self.is_trusted or self._is_usable(ordered := tuple(ordered), endpoints):
                return ordered
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self.fault(RAISED, _FAILED, error)
        return [one.endpoint for one in _best_first(list(map(ScoredEndpoint, endpoints, scores)))]

    def _is_usable(self, picked: Sequence[Endpoint], candidates: Sequence[Endpoint]) -> bool:
        if picked and _are_distinct(picked, candidates):
            return True
        complaint = "picked nothing, a pod twice or what is not a candidate; the pod with the best score is picked"
        self.fault(UNUSABLE, complaint)
        return False


_endpoint = attrgetter("endpoint")
_FAILED = "failed; the pod with the best score is picked"


def _are_distinct(chosen: Sequence[Endpoint], candidates: Iterable[Endpoint]) -> bool:
    """Return whether `chosen` has only candidates and no duplicates."""
    distinct = set(chosen)
    return len(distinct) == len(chosen) and distinct.issubset(candidates)


def _best_first(scored: Sequence[ScoredEndpoint]) -> list[ScoredEndpoint]:
    """Order as max-score-picker does, without its random choice among equals: the fewest requests in flight, then the
    least recent work."""
    return sorted(scored, key=lambda one: (-one.score, one.endpoint.load.crowding, one.endpoint.load.recent))
