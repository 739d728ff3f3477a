"""Filter, score, pick."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.decision import DecisionRecord, ScoredEndpoint
from proxy.core.errors import NoEndpoints, Saturated
from proxy.core.plugin import Filter, Picker, Scorer
from proxy.scheduling.profile import shares
from tests.helpers.scheduling.situations import Fixed, Keep, KeepIdle, counted, pod, profile, request

A, B, C = pod("a"), pod("b"), pod("c")


@dataclass(frozen=True, slots=True)
class OfMany(Keep):
    """As `Keep`, and says that it keeps all of two."""

    @property
    def keeps_up_to(self) -> int:
        return 2


def test_filters_run_in_order_on_the_remaining_pods() -> None:
    steps = ("first", Keep(("a", "b"))), ("second", Keep(("b", "c")))
    assert [one.endpoint for one in profile("default", *steps).run(request(), [A, B, C]).ranked] == [B]


def test_every_survivor_is_ranked_with_the_weighted_mean_of_its_scores() -> None:
    scorers = [
        (Fixed({"a": 1.0, "b": 0.0, "c": 0.5}), 0.75),
        (Fixed({"a": 0.0, "b": 1.0, "c": 0.5}), 0.25),
    ]
    ranked = profile("default", scorers=scorers).run(request(), [A, B, C]).ranked
    assert ranked == (ScoredEndpoint(A, 0.75), ScoredEndpoint(C, 0.5), ScoredEndpoint(B, 0.25))


def test_without_scorers_all_score_0() -> None:
    assert [one.score for one in profile("default").run(request(), [A, B]).ranked] == [0.0, 0.0]


def test_an_order_is_of_the_endpoints_that_the_filter_keeps() -> None:
    only = profile("only", ("first", Keep(("a",))))
    assert [one.name for one in only.order(request(), [pod("a"), pod("b"), pod("c")])] == ["a"]


def test_a_filter_that_keeps_all_of_so_few_endpoints_is_called_for_more_and_for_a_record() -> None:
    only = profile("only", ("first", OfMany(("a",))))
    assert len(only.order(request(), [A, B])) == 2
    assert len(only.order(request(), [A, B], DecisionRecord())) == 1
    assert len(only.order(request(), [A, B, C])) == 1
    with pytest.raises(NoEndpoints):
        only.order(request(), [])


def test_every_filter_is_called_if_one_might_remove_endpoints() -> None:
    only = profile("only", ("first", OfMany(("a", "b"))), ("second", Keep(("b",))))
    assert list(only.order(request(), [A, B])) == [B]


def test_an_emptied_list_names_profile_and_filter_and_stops_the_chain() -> None:
    steps = ("roles", Keep(())), ("later", KeepIdle(()))
    with pytest.raises(NoEndpoints, match=r"filter 'roles' of profile 'default'"):
        profile("default", *steps).run(request(), [A])


def test_a_filter_can_report_that_all_are_busy() -> None:
    with pytest.raises(Saturated, match=r"filter 'load' of profile 'default'"):
        profile("default", ("load", KeepIdle(()))).run(request(), [A])


def test_without_pods_no_filter_is_blamed() -> None:
    with pytest.raises(NoEndpoints, match="No pod is ready"):
        profile("default", ("load", KeepIdle(()))).run(request(), [])


def test_the_best_score_wins_if_the_picker_picks_nothing() -> None:
    class NoPick(Picker):
        def pick(self, run, request, scored):  # type: ignore[no-untyped-def]
            return []

    scorers = [(Fixed({"a": 0.0, "b": 1.0}), 1.0)]
    assert profile("default", scorers=scorers, picker=NoPick()).run(request(), [A, B]).best is B
    assert profile("default", scorers=scorers, picker=NoPick()).order(request(), [A, B])[0] is B


def test_plugins_get_a_tuple_that_they_cannot_sort() -> None:
    class Sorting(Scorer):
        def score(self, run, request, endpoints):  # type: ignore[no-untyped-def]
            endpoints.sort(key=lambda endpoint: endpoint.name, reverse=True)
            return [0.5] * len(endpoints)

    class Listing(Filter):
        def filter(self, run, request, endpoints):  # type: ignore[no-untyped-def]
            assert isinstance(endpoints, tuple)
            return list(endpoints)

    seen: list[tuple[str, str]] = []
    scorers: list[tuple[Scorer, float]] = [(Sorting(), 0.5), (Fixed({"a": 0.25, "b": 0.5, "c": 1.0}), 0.5)]
    steps = ("first", Listing()), ("second", Listing())
    made, candidates = profile("default", *steps, scorers=scorers, faults=counted(seen)), [A, B, C]
    assert made.order(request(), candidates) == (C, B, A)
    assert [one.score for one in made.run(request(), candidates).ranked] == [0.5, 0.25, 0.125]
    assert candidates == [A, B, C]
    assert seen == [("mine", "raised")] * 2


@given(st.lists(st.floats(0, 1e308), max_size=8))
def test_shares_keep_proportions_and_sum_to_1_or_are_all_0(weights: list[float]) -> None:
    parts = shares(weights)
    assert len(parts) == len(weights)
    assert all(0.0 <= part <= 1.0 for part in parts)
    if any(weights):
        assert sum(parts) == pytest.approx(1.0)
        assert parts.index(max(parts)) == weights.index(max(weights))
    else:
        assert not any(parts)
