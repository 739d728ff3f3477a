"""The guard around a scorer: whatever it does, there is one score in [0, 1] per endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer
from proxy.core.request import InferenceRequest

log = logging.getLogger(__name__)

Report = Callable[[str, str], None]
"""Told the name of a plugin and its fault, once per faulty call."""

OUT_OF_RANGE = "out-of-range"
NOT_A_NUMBER = "nan"
WRONG_LENGTH = "wrong-length"
RAISED = "raised"


def unreported(name: str, fault: str) -> None:
    """The report of those who do not count."""


class GuardedScorer(Scorer):
    """Clamps what is out of range, makes 0 of NaN, and scores 0 for all where the scorer fails.

    Every faulty call is reported; the first of each kind is logged too.
    """

    def __init__(self, scorer: Scorer, name: str, report: Report = unreported) -> None:
        self.plugin_type = scorer.plugin_type  # type: ignore[misc]  # it answers for the scorer it guards
        self.unguarded = scorer
        self.name = name
        self._report = report
        self._logged: set[str] = set()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        try:
            scores = self.unguarded.score(run, request, endpoints)
            if len(scores) != len(endpoints):
                self._fault(WRONG_LENGTH, f"gave {len(scores)} scores for {len(endpoints)} pods")
                return [0.0] * len(endpoints)
            for score in scores:
                if not 0.0 <= score <= 1.0:  # as is NaN
                    return self._repair(scores)
            return scores
        except Exception as error:  # noqa: BLE001  # whatever it is, the cycle goes on
            self._fault(RAISED, "failed", error)
            return [0.0] * len(endpoints)

    def _repair(self, scores: Sequence[float]) -> list[float]:
        if any(score != score for score in scores):
            self._fault(NOT_A_NUMBER, "gave NaN, which counts as 0")
        if any(score < 0.0 or score > 1.0 for score in scores):
            self._fault(OUT_OF_RANGE, f"gave scores outside [0, 1], which are clamped: {min(scores)} to {max(scores)}")
        return [min(1.0, max(0.0, score)) if score == score else 0.0 for score in scores]

    def _fault(self, fault: str, complaint: str, error: Exception | None = None) -> None:
        self._report(self.name, fault)
        if fault not in self._logged:
            self._logged.add(fault)
            log.error("scorer %s %s; further such calls are only counted", self.name, complaint, exc_info=error)
