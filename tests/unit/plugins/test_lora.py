"""lora-affinity-scorer that spreads hot adapters, and remembers what engines do not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.core.attempt import Ending
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.latency.forecast import LATENCY
from tests.helpers.plugins.situations import RUN, Foretold, attempt, make, pod, request

POEMS = request(model="poems")


def having(name: str, **more: Any) -> Endpoint:
    return pod(name, active_models=frozenset({"poems"}), max_active_models=2, **more)


def awaiting(name: str, **more: Any) -> Endpoint:
    return pod(
        name, active_models=frozenset({"x", "y"}), waiting_models=frozenset({"poems"}), max_active_models=2, **more
    )


def free(name: str, **more: Any) -> Endpoint:
    return pod(name, max_active_models=2, **more)


def full(name: str) -> Endpoint:
    return pod(name, active_models=frozenset({"x", "y"}), max_active_models=2)


class TestRebalance:
    SCORER = make("lora-affinity-scorer", rebalance={"requests": 4, "seconds": 1.0})

    def scores(self, *pods: Endpoint, incoming: Any = POEMS) -> list[float]:
        return self.SCORER.score(RUN, incoming, pods)  # type: ignore[no-any-return]

    def test_a_pod_where_the_adapter_waits_precedes_one_with_a_free_slot(self) -> None:
        assert self.scores(having("a"), awaiting("b"), free("c"), full("d")) == [1.0, 0.9, 0.8, 0.0]

    def test_a_hot_adapter_spreads_when_all_its_pods_are_behind(self) -> None:
        assert self.scores(having("a", running=4), free("b")) == [1.0, 0.8]
        assert self.scores(having("a", running=5), free("b"), full("c")) == [0.8, 1.0, 0.0]
        assert self.scores(having("a", running=5), awaiting("b", running=5), free("c")) == [0.8, 0.6, 1.0]

    def test_it_stays_if_one_of_its_pods_is_not_behind(self) -> None:
        assert self.scores(having("a", running=50), having("b"), free("c")) == [1.0, 1.0, 0.8]

    def test_no_pod_gets_more_adapters_than_it_can_hold(self) -> None:
        assert self.scores(having("a", running=50), full("b"), pod("c")) == [1.0, 0.0, 0.0]

    def test_with_predictions_the_comparison_is_in_seconds(self) -> None:
        incoming = request(model="poems")
        incoming.state.write(LATENCY, Foretold({"a": 1.1, "b": 0.0}))
        assert self.scores(having("a"), free("b"), incoming=incoming) == [0.8, 1.0]


class TestRemember:
    @staticmethod
    def scorer(clock: ManualClock) -> Any:
        return make("lora-affinity-scorer", clock=clock, remember="60s")

    def test_without_a_producer_only_reports_of_pods_count(self) -> None:
        scorer, a = make("lora-affinity-scorer"), free("a")
        scorer.pre_request(attempt(POEMS, a), a)
        assert scorer.score(RUN, POEMS, [a]) == [0.8]

    def test_a_burst_between_scrapes_stays_together(self) -> None:
        clock = ManualClock()
        scorer, a, b = self.scorer(clock), free("a"), free("b")
        scorer.pre_request(attempt(POEMS, a, b), a)
        assert scorer.score(RUN, POEMS, [a, b]) == [1.0, 0.8]

    def test_an_adapter_stays_loaded_for_a_while_after_its_last_request(self) -> None:
        clock = ManualClock()
        scorer, a = self.scorer(clock), free("a")
        scorer.pre_request(attempt(POEMS, a), a)
        clock.advance(59.0)
        assert scorer.score(RUN, POEMS, [a]) == [1.0]
        clock.advance(1.0)
        assert scorer.score(RUN, POEMS, [a]) == [0.8]

    def test_other_adapters_replace_it(self) -> None:
        scorer, a = self.scorer(ManualClock()), free("a")
        for model in ("poems", "x", "y"):
            incoming = request(model=model)
            scorer.pre_request(attempt(incoming, a), a)
        assert scorer.score(RUN, POEMS, [a]) == [0.0]

    def test_adapters_sent_since_the_last_scrape_occupy_slots(self) -> None:
        clock = ManualClock(10.0)
        scorer, a = self.scorer(clock), pod("a", max_active_models=1, scraped_at=5.0)
        scorer.pre_request(attempt(request(model="x"), a), a)
        assert scorer.score(RUN, POEMS, [a]) == [0.0]
        a.publish(replace(a.metrics, scraped_at=11.0), 0)
        assert scorer.score(RUN, POEMS, [a]) == [0.8]

    def test_a_model_never_listed_as_an_adapter_is_none(self) -> None:
        clock = ManualClock()
        scorer, base = self.scorer(clock), request(model="base")
        a, b = free("a", scraped_at=2.0), free("b")
        dispatched = attempt(base, a, b)
        scorer.pre_request(dispatched, a)
        assert scorer.score(RUN, base, [a, b]) == [1.0, 0.8]
        dispatched.first_byte_at, dispatched.last_byte_at = 1.0, 3.0
        dispatched.status, dispatched.ending = 200, Ending.COMPLETE
        scorer.post_response(dispatched, a)
        scorer.pre_request(attempt(base, a, b), a)
        assert scorer.score(RUN, base, [a, b]) == [0.8, 0.8]

    def test_an_adapter_listed_while_it_ran_is_one(self) -> None:
        scorer, a = self.scorer(ManualClock()), having("a", scraped_at=2.0)
        dispatched = attempt(POEMS, a)
        scorer.pre_request(dispatched, a)
        dispatched.first_byte_at, dispatched.last_byte_at = 1.0, 3.0
        dispatched.status, dispatched.ending = 200, Ending.COMPLETE
        scorer.post_response(dispatched, a)
        a.publish(replace(a.metrics, active_models=frozenset()), 0)
        assert scorer.score(RUN, POEMS, [a]) == [1.0]

    def test_a_restarted_pod_has_no_adapter_loaded(self) -> None:
        scorer, a = self.scorer(ManualClock()), free("a")
        scorer.pre_request(attempt(POEMS, a), a)
        scorer.endpoint_removed(a)
        assert scorer.score(RUN, POEMS, [a]) == [0.8]
