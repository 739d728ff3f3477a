"""Pods that respond on other data-parallel ranks than requests name."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, Metrics, join_ranks
from proxy.core.errors import RankOutOfRange
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.fleet.rank_check import ENOUGH, SLACK, STRIKES, RankCheck

RANKS = 4


class World:
    """A pod of four ranks, whose counters are scraped after every response."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.ranks = [Endpoint(f"a/{rank}", rank=rank) for rank in range(RANKS)]
        join_ranks(self.ranks)
        self.counted = [0.0] * RANKS
        self.ignored: list[str] = []
        self.refused: list[tuple[str, int]] = []
        self.check = RankCheck(
            self.clock,
            lambda pod: self.ignored.append(pod.name),
            lambda rank, size: self.refused.append((rank.name, size)),
        )
        self.scrape()

    def scrape(self) -> None:
        self.clock.advance(2 * SLACK)
        for rank, counted in zip(self.ranks, self.counted, strict=True):
            rank.publish(Metrics(prompt_tokens=counted, scraped_at=self.clock.now()), 0)
        self.clock.advance(0.001)

    def ask(
        self, named: int, served_by: int | None, tokens: int = 100, path: str = "/v1/chat/completions", **keys: Any
    ) -> None:
        """A request that names one rank and is counted by another, or by none."""
        attempt = Attempt(
            InferenceRequest(id="1", path=path, model="m"),
            Decision(self.ranks[named]),
            self.ranks[named],
            0,
            self.clock.now(),
        )
        attempt.usage, attempt.status, attempt.ending = Usage(tokens, 1), 200, Ending.COMPLETE
        for key, value in keys.items():
            setattr(attempt, key, value)
        if served_by is not None:
            self.counted[served_by] += tokens
        self.check.attempt_ended(attempt)
        self.scrape()

    def ask_often(self, times: int = STRIKES * (ENOUGH + 2), elsewhere: int = 0, **keys: Any) -> None:
        for number in range(times):
            self.ask(number % 2, (number % 2 + elsewhere) % RANKS, **keys)


def test_a_pod_that_obeys_the_header_keeps_its_ranks() -> None:
    world = World()
    world.ask_often(500)
    assert world.ignored == []


def test_tokens_on_other_ranks_show_that_the_pod_ignores_the_header() -> None:
    world = World()
    world.ask_often(elsewhere=2)
    assert world.ignored == ["a/0"]


def test_a_rank_that_the_pod_does_not_have_is_reported_at_once() -> None:
    world = World()
    attempt = Attempt(
        InferenceRequest(id="1", path="/", model="m"), Decision(world.ranks[3]), world.ranks[3], 0, world.clock.now()
    )
    world.check.attempt_ended(attempt, RankOutOfRange(3, 2, "data_parallel_rank 3 is out of range [0, 2)."))
    assert (world.refused, world.ignored) == ([("a/3", 2)], [])


def test_one_comparison_is_not_enough() -> None:
    world = World()
    world.ask_often(ENOUGH + 2, elsewhere=2)
    assert world.ignored == []


def test_requests_of_other_clients_prove_nothing() -> None:
    world = World()
    for _ in range(20):
        world.counted[3] += 5000
        world.ask_often(10)
    assert world.ignored == []


def test_counters_without_cached_tokens_prove_nothing() -> None:
    world = World()
    for number in range(100):
        world.ask(number % 2, None)
    assert world.ignored == []


@pytest.mark.parametrize("keys", [{"usage": None}, {"status": 500}, {"stage": Stage.DECODE}, {"path": "/v1/responses"}])
def test_responses_that_cannot_be_compared_are_left_out(keys: dict[str, object]) -> None:
    world = World()
    world.ask_often(100, elsewhere=2, **keys)
    assert world.ignored == []


def test_ranks_without_counters_are_left_alone() -> None:
    world = World()
    world.counted = [-1.0] * RANKS
    for number in range(100):
        world.ask(number % 2, None)
    assert world.ignored == []


def test_a_restarted_pod_is_checked_again() -> None:
    world = World()
    world.counted = [9000.0] * RANKS
    world.ask_often(10)
    world.counted = [0.0] * RANKS
    world.ask_often(10)
    assert world.ignored == []
