"""Data-parallel ranks that step together, and those that do not."""

from __future__ import annotations

import random

import pytest

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.clock import ManualClock
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, Freshness, Metrics, join_ranks
from proxy.core.ports import InstanceName
from proxy.core.request import InferenceRequest, Prompt
from proxy.latency.lockstep import Lockstep
from proxy.latency.pod import PodModel, Prices, Work
from proxy.latency.rates import FleetModel
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer

STEP, PER_TOKEN = 0.01, 100e-6
"""Seconds of an engine step, and of a prompt token."""


class Ranks:
    """Two ranks. The first one answers while the second one computes prompts, of which `delays` shows in the answer."""

    def __init__(self, delays: float) -> None:
        self.delays = delays
        self.endpoints = [Endpoint(f"a/{rank}", rank=rank) for rank in range(2)]
        join_ranks(self.endpoints)
        fleet, self.lockstep = FleetModel(), Lockstep()
        prices = Prices(0.0, 0.03)
        self.models = [PodModel(endpoint, fleet, prices, 0.0, self.lockstep) for endpoint in self.endpoints]
        self.now = 0.0
        self._random = random.Random(1)

    def send(self, rank: int, prompt: int) -> tuple[Attempt, Work]:
        request = InferenceRequest("r", "/v1/completions", "m", Prompt((b"x" * 4 * prompt,)), stream=True)
        endpoint = self.endpoints[rank]
        attempt = Attempt(request, Decision(endpoint), endpoint, 0, self.now)
        endpoint.charge(1, prompt)
        return attempt, self.models[rank].dispatch(attempt, prompt, prompt, self.now)

    def first_token(self, attempt: Attempt, seconds: float) -> None:
        self.now += seconds
        attempt.status, attempt.first_byte_at = 200, self.now

    def end(self, rank: int, attempt: Attempt, work: Work, tokens: int) -> None:
        attempt.last_byte_at, attempt.ending, attempt.chunks = self.now, Ending.COMPLETE, tokens
        attempt.usage = Usage(attempt.request.prompt.tokens, tokens)
        self.endpoints[rank].charge(-1, 0)
        self.models[rank].end(work, self.now)
        self.models[rank].catch_up(self.now)

    def answer(self, prompts_elsewhere: int, tokens: int = 100) -> None:
        """A response on the first rank, while the second one computes so many prompts."""
        attempt, work = self.send(0, 10)
        self.first_token(attempt, STEP)
        self.models[0].catch_up(self.now)
        elsewhere = 0.0
        for _ in range(prompts_elsewhere):
            other, others = self.send(1, 2000)
            self.first_token(other, STEP + 2000 * PER_TOKEN)
            elsewhere += 2000 * PER_TOKEN
            self.end(1, other, others, 1)
        began = attempt.first_byte_at or 0.0
        self.now = max(self.now, began + tokens * STEP + self.delays * elsewhere)
        self.end(0, attempt, work, tokens)
        self.now += 0.5

    def work(self, times: int = 150) -> None:
        for _ in range(times):
            self.answer(self._random.randrange(4))


@pytest.mark.parametrize(("delays", "least", "most"), [(1.0, 0.6, 1.0), (0.0, 0.0, 0.2)])
def test_responses_show_whether_ranks_step_together(delays: float, least: float, most: float) -> None:
    ranks = Ranks(delays)
    ranks.work()
    assert least <= ranks.lockstep.share <= most


def test_before_anything_is_known_ranks_are_independent() -> None:
    assert Ranks(1.0).lockstep.share == 0.0


def test_a_prompt_is_charged_for_the_responses_on_all_ranks_that_step_together() -> None:
    ranks = Ranks(1.0)
    ranks.work()
    busy, idle = ranks.endpoints
    before = ranks.models[1].cost[1]
    busy.publish(Metrics(running=20, freshness=Freshness.FRESH, scraped_at=ranks.now), 0)
    ranks.models[0].catch_up(ranks.now)
    ranks.models[1].refresh()
    ranks.models[1].catch_up(ranks.now)
    share = ranks.lockstep.share
    assert ranks.models[1].cost[1] == pytest.approx(before + 0.03 * share * 20 * ranks.models[1].own[1], rel=0.1)
    assert ranks.models[1].delay(1000, 1000) > 0
    ranks.models[0].leave()
    ranks.models[1].refresh()
    ranks.models[1].catch_up(ranks.now)
    assert ranks.models[1].cost[1] == pytest.approx(before, rel=0.1)
    assert idle.rank == 1


def test_the_pace_of_a_rank_leaves_out_what_other_ranks_held_up() -> None:
    together, apart = Ranks(1.0), Ranks(0.0)
    together.work(300)
    apart.work(300)
    assert together.models[0].rates.step < 1.5 * apart.models[0].rates.step


def test_only_ranks_of_one_pod_share_what_is_learnt() -> None:
    producer = PredictedLatencyProducer(InstanceName("p"), ManualClock())
    ranks = [Endpoint(f"a/{rank}", rank=rank) for rank in range(2)]
    other, plain = [Endpoint(f"b/{rank}", rank=rank) for rank in range(2)], Endpoint("c")
    join_ranks(ranks)
    join_ranks(other)
    first, second, third, last = producer.known((*ranks, other[0], plain), 0.0)
    assert first.lockstep is second.lockstep is not None
    assert third.lockstep not in (None, first.lockstep)
    assert last.lockstep is None
    producer.endpoint_removed(ranks[1])
    assert producer.known((ranks[0], plain), 0.0)[0] is first
