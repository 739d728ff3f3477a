"""Guards around scorers, filters and pickers: whatever a plugin returns or raises, the request goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.errors import RequestError
from proxy.core.plugin import Filter, Picker, Scorer
from proxy.core.plugin_faults import NOT_A_NUMBER, OUT_OF_RANGE, RAISED, UNUSABLE, WRONG_LENGTH, PluginFaults
from proxy.core.registry import is_built_in
from proxy.core.request import InferenceRequest

_endpoint = attrgetter("endpoint")


class GuardedScorer(Scorer):
    """Clamps what is out of range, makes 0 of NaN, and scores 0 for all where the scorer fails."""

    def __init__(self, scorer: Scorer, name: str, faults: PluginFaults) -> None:
        self.plugin_type = scorer.plugin_type  # type: ignore[misc]  # it answers for the scorer it guards
        self.unguarded = scorer
        self.name = name
        self._faults = faults

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        try:
            scores = self.unguarded.score(run, request, endpoints)
            if len(scores) != len(endpoints):
                self._fault(WRONG_LENGTH, f"gave {len(scores)} scores for {len(endpoints)} pods; each scores 0")
                return [0.0] * len(endpoints)
            for score in scores:
                if not 0.0 <= score <= 1.0:  # as is NaN
                    return self._repair(scores)
            return scores
        except Exception as error:  # noqa: BLE001  # whatever it is, the cycle goes on
            self._fault(RAISED, "failed; each pod scores 0", error)
            return [0.0] * len(endpoints)

    def _repair(self, scores: Sequence[float]) -> list[float]:
        if any(score != score for score in scores):
            self._fault(NOT_A_NUMBER, "gave NaN, which counts as 0")
        if any(score < 0.0 or score > 1.0 for score in scores):
            self._fault(OUT_OF_RANGE, f"gave scores outside [0, 1], which are clamped: {min(scores)} to {max(scores)}")
        return [min(1.0, max(0.0, score)) if score == score else 0.0 for score in scores]

    def _fault(self, fault: str, complaint: str, error: Exception | None = None) -> None:
        self._faults.report(self.name, fault, complaint, error)


class GuardedFilter(Filter):
    """Skips a filter that fails, and drops from its result what is not a candidate and what is there twice.

    A RequestError passes: it is how a filter refuses a request. The result of a built-in filter is not checked.
    """

    def __init__(self, inner: Filter, name: str, faults: PluginFaults) -> None:
        self.plugin_type = inner.plugin_type  # type: ignore[misc]  # it answers for the filter it guards
        self.exhausts = inner.exhausts  # type: ignore[misc]
        self._inner = inner
        self._is_trusted = is_built_in(inner)
        self._name = name
        self._faults = faults

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        try:
            kept = self._inner.filter(run, request, endpoints)
            if kept is endpoints:
                return kept
            kept = tuple(kept)
            if self._is_trusted or _are_distinct(kept, endpoints):
                return kept
            repaired = tuple(dict.fromkeys(one for one in kept if one in endpoints))
        except RequestError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self._faults.report(self._name, RAISED, "failed; the filter is skipped", error)
            return endpoints
        if not repaired:
            self._faults.report(self._name, UNUSABLE, "kept only what is not a candidate; the filter is skipped")
            return endpoints
        self._faults.report(self._name, UNUSABLE, "kept pods twice or pods that are not candidates; these are dropped")
        return repaired


class GuardedPicker(Picker):
    """Picks the best score first where the picker fails, picks nothing, or picks what is not a candidate.

    The result of a built-in picker is not checked: the check takes 0.8 % of the instructions of a request of 1 KB
    (`python bench/instructions.py --still`).
    """

    def __init__(self, inner: Picker, name: str, faults: PluginFaults) -> None:
        self.plugin_type = inner.plugin_type  # type: ignore[misc]  # it answers for the picker it guards
        self.name = name
        self.unguarded = inner
        self.is_trusted = is_built_in(inner)
        self._faults = faults

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> Sequence[ScoredEndpoint]:
        try:
            picked = tuple(self.unguarded.pick(run, request, scored))
            if self.is_trusted or (picked and _are_distinct(tuple(map(_endpoint, picked)), map(_endpoint, scored))):
                return picked
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self._failed(error)
        else:
            self._unusable()
        return _best_first(scored)

    def order(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        try:
            ordered = self.unguarded.order(run, request, endpoints, scores)
            if self.is_trusted:
                return ordered
            ordered = tuple(ordered)
            if ordered and _are_distinct(ordered, endpoints):
                return ordered
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self._failed(error)
        else:
            self._unusable()
        return [one.endpoint for one in _best_first(list(map(ScoredEndpoint, endpoints, scores)))]

    def _failed(self, error: Exception) -> None:
        self._faults.report(self.name, RAISED, "failed; the pod with the best score is picked", error)

    def _unusable(self) -> None:
        complaint = "picked nothing, a pod twice or what is not a candidate; the pod with the best score is picked"
        self._faults.report(self.name, UNUSABLE, complaint)


def _are_distinct(chosen: Sequence[Endpoint], candidates: Iterable[Endpoint]) -> bool:
    """Whether each of `chosen` is a candidate and none is there twice."""
    distinct = set(chosen)
    return len(distinct) == len(chosen) and distinct.issubset(candidates)


def _best_first(scored: Sequence[ScoredEndpoint]) -> list[ScoredEndpoint]:
    """As max-score-picker, without its draw among equals: the fewest requests in flight, then the least recent work."""
    return sorted(scored, key=lambda one: (-one.score, one.endpoint.load.crowding, one.endpoint.load.recent))
