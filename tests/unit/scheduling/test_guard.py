"""No scorer, filter or picker can abort a cycle."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest
from proxy.core.plugin import Filter, Picker, Scorer
from proxy.core.ports import ManualClock
from proxy.core.registry import PluginFaults, is_built_in
from proxy.core.request import InferenceRequest
from proxy.plugins.pickers.max_score import MaxScorePicker
from proxy.scheduling.profile import GuardedFilter, GuardedPicker, GuardedScorer
from tests.helpers.scheduling.situations import RUN, counted, pod, request


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
    guard = GuardedScorer(Giving(given), "mine", counted(faults))
    scores = guard.score(RUN, request(), [pod(str(index)) for index in range(pods)])
    return list(scores), faults


def test_valid_scores_pass_unchanged() -> None:
    assert guarded([0.0, 1.0]) == ([0.0, 1.0], [])


def test_scores_out_of_range_are_clamped_and_counted() -> None:
    assert guarded([-0.5, 1.5]) == ([0.0, 1.0], [("mine", "out-of-range")])


def test_infinite_scores_are_clamped_and_counted() -> None:
    assert guarded([-math.inf, math.inf]) == ([0.0, 1.0], [("mine", "out-of-range")])


@pytest.mark.parametrize("given", [[math.nan, 0.5], [0.5, math.nan], [math.nan, math.nan]])
def test_nan_is_0_and_counted_at_any_position(given: list[float]) -> None:
    scores, faults = guarded(given)
    assert scores == [0.5 if score == 0.5 else 0.0 for score in given]
    assert faults == [("mine", "nan")]


@pytest.mark.parametrize("given", [[0.5], [0.1, 0.2, 0.3], []])
def test_a_wrong_number_of_scores_is_0_for_all_and_counted(given: list[float]) -> None:
    assert guarded(given) == ([0.0, 0.0], [("mine", "wrong-length")])


@pytest.mark.parametrize("given", [ZeroDivisionError("x"), None, 0.5, ["a", "b"], [None, 0.5]])
def test_a_scorer_that_fails_scores_0_for_all_and_is_logged_by_name(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert guarded(given) == ([0.0, 0.0], [("mine", "raised")])
    assert "mine" in caplog.text


def test_a_fault_is_counted_every_time_and_logged_once_a_minute_by_name(caplog: pytest.LogCaptureFixture) -> None:
    clock, faults = ManualClock(), list[tuple[str, str]]()
    shared = PluginFaults(clock, lambda name, fault: faults.append((name, fault)))
    guards = [GuardedScorer(Giving(ZeroDivisionError("x")), name, shared) for name in ("mine", "mine", "other")]
    for _ in range(4):
        for guard in guards:
            guard.score(RUN, request(), [pod("a")])
        clock.advance(20.0)
    assert faults.count(("mine", "raised")) == 8
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["mine", "other"] * 2


def test_the_guard_has_the_type_of_its_plugin() -> None:
    assert GuardedScorer(Giving([]), "mine", counted([])).plugin_type == "giving"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(), max_size=6))
def test_any_numbers_give_one_score_in_range_each(given: list[float]) -> None:
    scores, faults = guarded(given, pods=len(given))
    assert len(scores) == len(given)
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert bool(faults) == any(not 0.0 <= score <= 1.0 for score in given)


A, B, C, FOREIGN = pod("a"), pod("b"), pod("c"), pod("foreign")


class Keeping(Filter):
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Any:
        if isinstance(self.kept, Exception):
            raise self.kept
        return self.kept


class Picking(Picker):
    def __init__(self, picked: Any) -> None:
        self.picked = picked

    def pick(self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]) -> Any:
        if isinstance(self.picked, Exception):
            raise self.picked
        return self.picked


@pytest.mark.parametrize(
    ("kept", "expected", "fault"),
    [
        ([B, A], (B, A), None),
        ([], (), None),
        ((one for one in (A, C)), (A, C), None),
        ([B, B, A], (B, A), "unusable"),
        ([FOREIGN, B], (B,), "unusable"),
        ([FOREIGN], (A, B, C), "unusable"),
        (["a"], (A, B, C), "unusable"),
        (None, (A, B, C), "raised"),
        (7, (A, B, C), "raised"),
        ([[]], (A, B, C), "raised"),
        (ZeroDivisionError("x"), (A, B, C), "raised"),
        (StopIteration(), (A, B, C), "raised"),
    ],
)
def test_a_filter_that_fails_is_skipped_and_an_unusable_result_repaired(
    kept: Any, expected: tuple[Endpoint, ...], fault: str | None
) -> None:
    faults: list[tuple[str, str]] = []
    guard = GuardedFilter(Keeping(kept), "mine", counted(faults))
    assert tuple(guard.filter(RUN, request(), (A, B, C))) == expected
    assert faults == ([("mine", fault)] if fault else [])


def test_a_filter_refuses_a_request_with_a_request_error() -> None:
    faults: list[tuple[str, str]] = []
    guard = GuardedFilter(Keeping(BadRequest("No.")), "mine", counted(faults))
    with pytest.raises(BadRequest, match="No"):
        guard.filter(RUN, request(), (A,))
    assert faults == []


SCORED = (ScoredEndpoint(A, 0.1), ScoredEndpoint(B, 0.9), ScoredEndpoint(C, 0.5))


@pytest.mark.parametrize(
    ("picked", "expected", "fault"),
    [
        ([SCORED[2], SCORED[0]], [C, A], None),
        ([], [B, C, A], "unusable"),
        ([SCORED[0], SCORED[0]], [B, C, A], "unusable"),
        ([ScoredEndpoint(FOREIGN, 1.0)], [B, C, A], "unusable"),
        (None, [B, C, A], "raised"),
        ([A], [B, C, A], "raised"),
        (ZeroDivisionError("x"), [B, C, A], "raised"),
        (BadRequest("Only a filter refuses."), [B, C, A], "raised"),
    ],
)
def test_the_best_score_wins_if_the_picker_fails(picked: Any, expected: list[Endpoint], fault: str | None) -> None:
    faults: list[tuple[str, str]] = []
    guard = GuardedPicker(Picking(picked), "mine", counted(faults))
    assert [one.endpoint for one in guard.pick(RUN, request(), SCORED)] == expected
    assert list(guard.order(RUN, request(), (A, B, C), (0.1, 0.9, 0.5))) == expected
    assert faults == ([("mine", fault)] * 2 if fault else [])


class Broken(random.Random):
    def random(self) -> float:
        raise OSError("no randomness")


def test_a_built_in_picker_that_fails_is_replaced_too() -> None:
    faults: list[tuple[str, str]] = []
    guard = GuardedPicker(MaxScorePicker(Broken()), "mine", counted(faults))
    assert [one.endpoint for one in guard.pick(RUN, request(), SCORED)] == [B, C, A]
    assert list(guard.order(RUN, request(), (A, B, C), (0.1, 0.9, 0.5))) == [B, C, A]
    assert faults == [("mine", "raised")] * 2


def test_only_results_of_built_in_plugins_are_trusted() -> None:
    assert is_built_in(MaxScorePicker(random.Random()))
    assert not is_built_in(Picking([]))
