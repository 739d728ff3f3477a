"""Asked together, scorers count as they do one by one behind their guards."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer
from proxy.core.request import InferenceRequest
from proxy.scheduling.profile import GuardedScorer, Scoring, Totals
from tests.helpers.scheduling.situations import RUN, counted, pod, request

PODS = [pod("a"), pod("b"), pod("c")]


class Giving(Scorer):
    plugin_type = "giving"

    def __init__(self, given: Any) -> None:
        self.given = given
        self.calls = 0

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Any:
        self.calls += 1
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


Outcome = tuple[list[float], list[tuple[str, str]]]


def outcome(kind: Any, scorers: Sequence[Giving], shares: Sequence[float]) -> Outcome:
    """Totals, and what was reported. `kind` returns what gives the totals of a Scoring."""
    faults: list[tuple[str, str]] = []
    guards = [GuardedScorer(scorer, str(index), counted(faults)) for index, scorer in enumerate(scorers)]
    return list(kind(Scoring(guards, shares))(RUN, request(), PODS)), faults


def together(scoring: Scoring) -> Totals:
    return scoring.totals


def one_by_one(scoring: Scoring) -> Totals:
    def totals(run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        scores = [scorer.score(run, request, endpoints) for scorer in scoring.scorers]
        return scoring.added_up(scores, len(endpoints))

    return totals


good = st.lists(st.floats(0, 1) | st.sampled_from([0, 1]), min_size=3, max_size=3)
strange = (
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(), max_size=5)
    | good.map(tuple)
    | st.sampled_from([ZeroDivisionError("x"), StopIteration(), None, 0.5, ["a", "b", "c"], [None, 0.5, 1.0]])
)


@given(st.lists(st.tuples(good | strange, st.floats(0, 1)), max_size=4))
def test_scoring_together_or_one_by_one_gives_the_same_totals_and_faults(given: list[tuple[Any, float]]) -> None:
    scorers, shares = [Giving(scores) for scores, _ in given], [share for _, share in given]
    assert outcome(together, scorers, shares) == outcome(one_by_one, scorers, shares)


@given(good | strange, st.sampled_from([1.0, 0.5]))
def test_a_single_scorer_gives_the_same_totals_and_faults(given: Any, share: float) -> None:
    assert outcome(Scoring.unguarded, [Giving(given)], [share]) == outcome(one_by_one, [Giving(given)], [share])


def test_a_single_scorer_runs_once() -> None:
    for scores in ([0.1, 0.2, 0.3], [0.0, 2.0, 0.0], None):
        sole = Giving(scores)
        outcome(Scoring.unguarded, [sole], [1.0])
        assert sole.calls == 1


@given(st.lists(st.tuples(good, st.floats(0, 1)), min_size=1, max_size=4))
def test_the_total_is_the_sum_of_share_times_score(given: list[tuple[list[float], float]]) -> None:
    scorers, shares = [Giving(scores) for scores, _ in given], [share for _, share in given]
    totals, faults = outcome(together, scorers, shares)
    assert totals == pytest.approx([sum(share * scores[at] for scores, share in given) for at in range(3)])
    assert faults == []


def test_valid_scorers_run_once_and_guards_run_again_after_a_fault() -> None:
    fine, other, wrong = Giving([0.1, 0.2, 0.3]), Giving([1.0, 0.0, 1.0]), Giving([0.0, 2.0, 0.0])
    outcome(together, [fine, other], [0.5, 0.5])
    assert (fine.calls, other.calls) == (1, 1)
    totals, faults = outcome(together, [fine, wrong], [0.5, 0.5])
    assert totals == pytest.approx([0.05, 0.6, 0.15])
    assert faults == [("1", "out-of-range")]
    assert (fine.calls, wrong.calls) == (1 + 2, 2)


@pytest.mark.parametrize(
    "wrong", [[0.5, math.nan, 0.5], [1.5, 0.5, 0.5], [0.5, 0.5], [0.5] * 4, ZeroDivisionError(), StopIteration()]
)
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_fault_is_reported_once_in_any_position_even_with_weight_0(wrong: Any, share: float) -> None:
    for scorers in ([Giving(wrong), Giving([0.0, 0.5, 1.0])], [Giving([0.0, 0.5, 1.0]), Giving(wrong)]):
        _, faults = outcome(together, scorers, [share, share])
        assert len(faults) == 1
