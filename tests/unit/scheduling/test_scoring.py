"""The totals of guarded scorers."""

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
from proxy.scheduling.profile import GuardedPicker, GuardedScorer, Profile
from tests.helpers.scheduling.situations import BestFirst, counted, pod, request

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


def outcome(scorers: Sequence[Giving], shares: Sequence[float]) -> tuple[list[float], list[tuple[str, str]]]:
    """Totals, and what was reported."""
    faults: list[tuple[str, str]] = []
    guards = [GuardedScorer(scorer, str(index), counted(faults)) for index, scorer in enumerate(scorers)]
    profile = Profile("default", [], guards, tuple(shares), GuardedPicker(BestFirst(), "picker", counted(faults)))
    scored = {one.endpoint: one.score for one in profile.run(request(), PODS).ranked}
    return [scored[each] for each in PODS], faults


good = st.lists(st.floats(0, 1) | st.sampled_from([0, 1]), min_size=3, max_size=3)
strange = (
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(), max_size=5)
    | good.map(tuple)
    | st.sampled_from([ZeroDivisionError("x"), StopIteration(), None, 0.5, ["a", "b", "c"], [None, 0.5, 1.0]])
)


@given(st.lists(st.tuples(good | strange, st.floats(0, 1)), max_size=4))
def test_whatever_scorers_return_each_counts_its_share_of_a_score_in_0_to_1(given: list[tuple[Any, float]]) -> None:
    scorers, shares = [Giving(scores) for scores, _ in given], [share for _, share in given]
    totals, faults = outcome(scorers, shares)
    alone = [outcome([Giving(scores)], [1.0]) for scores, _ in given]
    assert totals == pytest.approx(
        [sum(share * one[0][at] for share, one in zip(shares, alone, strict=True)) for at in range(3)]
    )
    assert [kind for _, kind in faults] == [kind for _, reported in alone for _, kind in reported]
    assert all(0.0 <= score <= 1.0 for scores, _ in alone for score in scores)
    assert [scorer.calls for scorer in scorers] == [1] * len(scorers)


@given(st.lists(st.tuples(good, st.floats(0, 1)), min_size=1, max_size=4))
def test_the_total_is_the_sum_of_share_times_score(given: list[tuple[list[float], float]]) -> None:
    scorers, shares = [Giving(scores) for scores, _ in given], [share for _, share in given]
    totals, faults = outcome(scorers, shares)
    assert totals == pytest.approx([sum(share * scores[at] for scores, share in given) for at in range(3)])
    assert faults == []


def test_a_fault_of_one_scorer_leaves_the_scores_of_the_others() -> None:
    totals, faults = outcome([Giving([0.1, 0.2, 0.3]), Giving([0.0, 2.0, 0.0])], [0.5, 0.5])
    assert totals == pytest.approx([0.05, 0.6, 0.15])
    assert faults == [("1", "out-of-range")]


@pytest.mark.parametrize(
    "wrong", [[0.5, math.nan, 0.5], [1.5, 0.5, 0.5], [0.5, 0.5], [0.5] * 4, ZeroDivisionError(), StopIteration()]
)
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_fault_is_reported_once_in_any_position_even_with_weight_0(wrong: Any, share: float) -> None:
    for scorers in ([Giving(wrong), Giving([0.0, 0.5, 1.0])], [Giving([0.0, 0.5, 1.0]), Giving(wrong)]):
        _, faults = outcome(scorers, [share, share])
        assert len(faults) == 1
