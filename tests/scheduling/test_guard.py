"""No scorer can abort a cycle."""

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
from proxy.scheduling.guard import GuardedScorer
from tests.scheduling.situations import RUN, pod, request


class Giving(Scorer):
    plugin_type = "giving"

    def __init__(self, given: Any) -> None:
        self.given = given

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def guarded(given: Any, pods: int = 2) -> tuple[list[float], list[tuple[str, str]]]:
    faults: list[tuple[str, str]] = []
    guard = GuardedScorer(Giving(given), "mine", lambda name, fault: faults.append((name, fault)))
    scores = guard.score(RUN, request(), [pod(str(index)) for index in range(pods)])
    return list(scores), faults


def test_good_scores_pass_untouched() -> None:
    assert guarded([0.0, 1.0]) == ([0.0, 1.0], [])


def test_what_is_out_of_range_is_clamped_and_counted() -> None:
    assert guarded([-0.5, 1.5]) == ([0.0, 1.0], [("mine", "out-of-range")])


def test_infinite_scores_are_clamped_and_counted() -> None:
    assert guarded([-math.inf, math.inf]) == ([0.0, 1.0], [("mine", "out-of-range")])


@pytest.mark.parametrize("given", [[math.nan, 0.5], [0.5, math.nan], [math.nan, math.nan]])
def test_nan_is_0_and_counted_wherever_it_stands(given: list[float]) -> None:
    scores, faults = guarded(given)
    assert scores == [0.5 if score == 0.5 else 0.0 for score in given]
    assert faults == [("mine", "nan")]


@pytest.mark.parametrize("given", [[0.5], [0.1, 0.2, 0.3], []])
def test_the_wrong_number_of_scores_is_0_for_all_and_counted(given: list[float]) -> None:
    assert guarded(given) == ([0.0, 0.0], [("mine", "wrong-length")])


@pytest.mark.parametrize("given", [ZeroDivisionError("x"), None, 0.5, ["a", "b"], [None, 0.5]])
def test_a_scorer_that_fails_scores_0_for_all_and_is_logged_by_name(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert guarded(given) == ([0.0, 0.0], [("mine", "raised")])
    assert "mine" in caplog.text


def test_a_fault_is_counted_every_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[str] = []
    guard = GuardedScorer(Giving(ZeroDivisionError("x")), "mine", lambda name, fault: faults.append(fault))
    for _ in range(3):
        guard.score(RUN, request(), [pod("a")])
    assert faults == ["raised"] * 3
    assert len(caplog.records) == 1


def test_the_guard_answers_for_the_type_it_guards() -> None:
    assert GuardedScorer(Giving([]), "mine").plugin_type == "giving"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(), max_size=6))
def test_whatever_numbers_come_out_there_is_one_score_in_range_each(given: list[float]) -> None:
    scores, faults = guarded(given, pods=len(given))
    assert len(scores) == len(given)
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert bool(faults) == any(not 0.0 <= score <= 1.0 for score in given)
