"""The order of the picked endpoints."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plugins.pickers.max_score import MaxScorePicker
from tests.helpers.plugins.situations import RUN, attempt, fault, make, pod, request, scored


def firsts(picker: Any, candidates: Any, draws: int = 4000) -> Counter[str]:
    return Counter(picker.pick(RUN, request(), candidates)[0].endpoint.name for _ in range(draws))


class TestMaxScore:
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
    def test_scores_descend(self, scores: list[float]) -> None:
        ranked = make("max-score-picker").pick(
            RUN, request(), scored([pod(str(i)) for i in range(len(scores))], scores)
        )
        assert [one.score for one in ranked] == sorted(scores, reverse=True)

    def test_equal_scores_go_to_the_least_recent_work(self) -> None:
        pods = [pod("busy", recent=2.0), pod("idle", recent=-1.0), pod("some", recent=0.5)]
        ranked = make("max-score-picker").pick(RUN, request(), scored(pods))
        assert [one.endpoint.name for one in ranked] == ["idle", "some", "busy"]

    def test_equal_scores_go_to_the_fewest_requests_in_flight_per_weight_first(self) -> None:
        pods = [pod("idle", recent=9.0), pod("two", requests=2), pod("strong", requests=3, weight=2.0)]
        ranked = make("max-score-picker").pick(RUN, request(), scored(pods))
        assert [one.endpoint.name for one in ranked] == ["idle", "strong", "two"]

    def test_a_better_score_beats_less_work(self) -> None:
        ranked = make("max-score-picker").pick(
            RUN, request(), scored([pod("idle"), pod("good", recent=9.0), pod("c")], [0.1, 0.2, 0.1])
        )
        assert ranked[0].endpoint.name == "good"

    @given(
        st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 5)), unique=True, max_size=12, min_size=1)
    )
    def test_without_full_ties_the_order_is_by_score_and_then_by_recent_work(self, ranks: list[Any]) -> None:
        pods = [pod(f"{score} {recent}", recent=float(recent)) for score, recent in ranks]
        ranked = make("max-score-picker").pick(RUN, request(), scored(pods, [score for score, _ in ranks]))
        assert [(one.score, one.endpoint.load.recent) for one in ranked] == sorted(
            ranks, key=lambda rank: (-rank[0], rank[1])
        )

    def test_a_tie_behind_the_best_never_moves_the_best(self) -> None:
        candidates = scored([pod("a"), pod("b"), pod("best", recent=9.0)], [0.1, 0.1, 0.2])
        ranked = [make("max-score-picker", seed=seed).pick(RUN, request(), candidates) for seed in range(20)]
        assert {tuple(one.endpoint.name for one in order) for order in ranked} == {
            ("best", "a", "b"),
            ("best", "b", "a"),
        }

    def test_complete_ties_are_drawn_and_not_by_order(self) -> None:
        candidates = scored([pod("a"), pod("b"), pod("c"), pod("d")])
        drawn = firsts(make("max-score-picker"), candidates)
        assert all(800 < drawn[name] < 1200 for name in "abcd")

    def test_equal_random_numbers_are_handled(self) -> None:
        class Unmoved(random.Random):
            def random(self) -> float:
                return 0.5

        picker, candidates = MaxScorePicker(Unmoved()), scored([pod("a"), pod("b")])
        assert set(picker.pick(RUN, request(), candidates)) == set(candidates)

    def test_equal_pods_are_drawn_by_weight(self) -> None:
        drawn = firsts(make("max-score-picker"), scored([pod("a", weight=3.0), pod("b")]))
        assert drawn["a"] / drawn["b"] == pytest.approx(3, rel=0.15)


class TestRandom:
    def test_weight_is_the_probability_and_scores_are_ignored(self) -> None:
        drawn = firsts(make("random-picker"), scored([pod("a", weight=3.0), pod("b")], [0.0, 1.0]))
        assert drawn["a"] / drawn["b"] == pytest.approx(3, rel=0.15)

    def test_a_pod_without_weight_is_last(self) -> None:
        assert firsts(make("random-picker"), scored([pod("never", weight=0.0), pod("b")])) == {"b": 4000}


class TestWeightedRandom:
    def test_score_times_weight_is_the_probability(self) -> None:
        candidates = scored([pod("a", weight=2.0), pod("b"), pod("c")], [0.25, 0.25, 0.75])
        drawn = firsts(make("weighted-random-picker"), candidates, 12000)
        total = 0.5 + 0.25 + 0.75
        for name, part in (("a", 0.5), ("b", 0.25), ("c", 0.75)):
            assert drawn[name] / 12000 == pytest.approx(part / total, rel=0.1)

    def test_a_score_of_0_is_picked_last(self) -> None:
        assert firsts(make("weighted-random-picker"), scored([pod("a"), pod("b")], [0.0, 0.01])) == {"b": 4000}

    def test_without_scores_it_is_a_random_picker(self) -> None:
        candidates = scored([pod("a", weight=3.0), pod("b")], [0.0, 0.0])
        drawn = firsts(make("weighted-random-picker"), candidates)
        assert drawn["a"] / drawn["b"] == pytest.approx(3, rel=0.15)

    def test_tiny_scores_keep_their_proportion(self) -> None:
        drawn = firsts(make("weighted-random-picker"), scored([pod("a"), pod("b")], [3e-12, 1e-12]))
        assert drawn["a"] / drawn["b"] == pytest.approx(3, rel=0.15)


class TestRoundRobin:
    @staticmethod
    def send(picker: Any, pods: Any, count: int) -> str:
        sent = []
        for _ in range(count):
            ranked = [one.endpoint for one in picker.pick(RUN, request(), scored(pods))]
            picker.pre_request(attempt(request(), *ranked), ranked[0])
            sent.append(ranked[0].name)
        return "".join(sent)

    def test_endpoints_are_picked_in_turn(self) -> None:
        assert self.send(make("round-robin-picker"), [pod("a"), pod("b"), pod("c")], 7) == "abcabca"

    def test_weights_are_spread_smoothly(self) -> None:
        pods = [pod("a", weight=5.0), pod("b"), pod("c")]
        assert self.send(make("round-robin-picker"), pods, 14) == "aabacaa" * 2

    def test_picking_without_dispatch_moves_nothing(self) -> None:
        picker = make("round-robin-picker")
        assert firsts(picker, scored([pod("a"), pod("b")]), 5) == {"a": 5}

    def test_the_order_of_the_candidates_does_not_matter(self) -> None:
        pods = [pod("a"), pod("b")]
        assert self.send(make("round-robin-picker"), pods[::-1], 4) == "abab"

    def test_a_retry_does_not_count_as_a_turn(self) -> None:
        picker, (a, b) = make("round-robin-picker"), (pod("a"), pod("b"))
        picker.pre_request(attempt(request(), b, a, number=1), b)
        assert self.send(picker, [a, b], 2) == "ab"

    def test_traffic_of_others_shifts_the_position_by_a_round_at_most(self) -> None:
        picker, (a, b) = make("round-robin-picker"), (pod("a"), pod("b"))
        for _ in range(1000):
            picker.pre_request(attempt(request(), a, b), a)
        assert self.send(picker, [a, b], 12).count("a") >= 4

    def test_a_removed_pod_is_dropped(self) -> None:
        picker, pods = make("round-robin-picker"), [pod("a"), pod("b")]
        self.send(picker, pods, 3)
        for gone in pods:
            picker.endpoint_removed(gone)
        assert picker._credit == {}


@pytest.mark.parametrize("kind", ["max-score-picker", "random-picker", "weighted-random-picker"])
@pytest.mark.parametrize("scores", [[0.1, 0.2, 0.3], [0.5, 0.5, 0.5]])
@pytest.mark.parametrize(("most", "named"), [(-1, 3), (0, 3), (1, 1), (2, 2), (9, 3)])
def test_a_decision_names_as_many_endpoints_as_are_configured(
    kind: str, scores: list[float], most: int, named: int
) -> None:
    pods, picker = [pod("a"), pod("b"), pod("c")], make(kind, maxNumOfEndpoints=most)
    picked = picker.pick(RUN, request(), scored(pods, scores))
    assert len(picked) == len(picker.order(RUN, request(), pods, scores)) == named
    if kind == "max-score-picker":
        assert picked[0].score == max(scores)


@pytest.mark.parametrize("kind", ["max-score-picker", "random-picker", "weighted-random-picker", "round-robin-picker"])
def test_without_a_number_a_decision_names_all_endpoints(kind: str) -> None:
    candidates = scored([pod("a"), pod("b"), pod("c")], [0.1, 0.2, 0.3])
    assert len(make(kind).pick(RUN, request(), candidates)) == 3


def test_round_robin_refuses_a_number_of_endpoints_with_its_reason() -> None:
    assert "counts the turns of every candidate" in fault("round-robin-picker", maxNumOfEndpoints=2)
