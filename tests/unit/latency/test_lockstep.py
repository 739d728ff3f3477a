"""Data-parallel ranks that step together, and ranks that do not."""

from __future__ import annotations

import random

import pytest

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, Freshness, Metrics, join_ranks
from proxy.core.ports import InstanceName, ManualClock
from proxy.core.request import InferenceRequest
from proxy.core.state import PluginState
from proxy.latency.lockstep import WORK_PRICE, WORK_SECONDS, Lockstep
from proxy.latency.pod import PodModel, Prices, charge_lockstep
from proxy.latency.rates import FleetModel, Rates
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer

STEPS, INTERVAL = 25.0, 0.25
"""Engine steps between two scrapes, and seconds."""


class Ranks:
    """Four ranks; each sometimes computes a prompt and steps more slowly."""

    def __init__(self, *, together: bool, noise: float = 0.05) -> None:
        self.together = together
        self.noise = noise
        self.endpoints = [Endpoint(f"a/{rank}", rank=rank) for rank in range(4)]
        join_ranks(self.endpoints)
        self.fleet = FleetModel()
        self.lockstep = Lockstep(self.fleet)
        self.models = [
            PodModel(endpoint, self.fleet, Prices(0.0, 0.03), 0.0, self.lockstep) for endpoint in self.endpoints
        ]
        self.now = 0.0
        self._tokens = [0.0] * 4
        self._random = random.Random(1)

    def scrape(self, running: int = 10, *, counts: bool = True) -> None:
        self.now += INTERVAL
        slower = [1.0 - 0.6 * self._random.random() * (self._random.random() < 0.3) for _ in self.endpoints]
        if self.together:
            slower = [min(slower)] * 4
        for rank, endpoint in enumerate(self.endpoints):
            self._tokens[rank] += running * STEPS * slower[rank] * (1 + self.noise * (self._random.random() - 0.5))
            tokens = self._tokens[rank] if counts else -1.0
            metrics = Metrics(running=running, generation_tokens=tokens, scraped_at=self.now, freshness=Freshness.FRESH)
            endpoint.publish(metrics, 0)
        for model in self.models:
            model.catch_up(self.now)

    def charged(self, tokens: float) -> list[float]:
        found = [0.0] * len(self.models)
        charge_lockstep(self.models, found, tokens, 0.0, {}, 0.5 * tokens, self.now)
        return found

    def work(self, scrapes: int = 200) -> None:
        for _ in range(scrapes):
            self.scrape()


@pytest.mark.parametrize(("together", "least", "most"), [(True, 0.7, 1.0), (False, 0.0, 0.2)])
def test_the_paces_of_ranks_show_lockstep(together: bool, least: float, most: float) -> None:
    ranks = Ranks(together=together)
    ranks.work()
    assert least <= ranks.lockstep.share <= most


def test_before_any_observation_ranks_are_independent() -> None:
    ranks = Ranks(together=True)
    assert ranks.lockstep.share == 0.0
    ranks.work(3)
    assert ranks.lockstep.share < 0.3


def test_ranks_without_token_counts_or_requests_show_nothing() -> None:
    ranks = Ranks(together=True)
    for _ in range(100):
        ranks.scrape(counts=False)
    for _ in range(100):
        ranks.scrape(running=1)
    assert ranks.lockstep.share == 0.0


def test_a_prompt_is_charged_for_the_responses_on_all_ranks_in_lockstep() -> None:
    ranks = Ranks(together=True)
    ranks.work()
    first, second, *_ = ranks.models
    own, share = first.own[1], ranks.lockstep.share
    assert first.cost[1] == pytest.approx(own * (1.0 + 0.03 * 10 * (1.0 - share)), rel=0.01)
    assert ranks.charged(1000.0) == pytest.approx([0.03 * share * 40 * 1000.0 * own] * 4, rel=0.01)
    assert first.delay(1000, 1000) == pytest.approx(first.work(1000, 1000) * (10 + share * 30), rel=0.01)
    for other in ranks.models[2:]:
        ranks.lockstep.leave(other)
    assert ranks.lockstep.elsewhere(second) == pytest.approx(share * 10)


def test_a_prompt_shorter_than_another_ranks_queue_delays_nothing() -> None:
    ranks = Ranks(together=True)
    ranks.work()
    ranks.models[0].rest += 2000.0 * ranks.models[0].own[1]
    longest, shorter, *_ = ranks.charged(1000.0)
    assert longest > 0.0
    assert shorter == 0.0
    assert ranks.charged(3000.0)[1] == pytest.approx(longest, rel=0.05)


def test_what_one_rank_shows_of_its_speed_holds_for_all_ranks_of_the_pod() -> None:
    ranks = Ranks(together=True)
    slow, fast = Endpoint("b"), Endpoint("c")
    others = [PodModel(each, ranks.fleet, Prices(0.0, 0.03), 0.0) for each in (slow, fast)]
    for _ in range(50):
        ranks.models[0].rates.observe_prefill(1.0, 0.0, 1000.0, 0.0)
        others[0].rates.observe_prefill(0.1, 0.0, 1000.0, 0.0)
    ranks.scrape()
    assert [model.own[1] for model in ranks.models] == pytest.approx([1e-3] * 4, rel=0.2)
    assert others[0].rates.per_token == pytest.approx(1e-4, rel=0.2)


def test_the_cached_tokens_of_ranks_are_those_of_a_usual_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(together=True)
    for rank, endpoint in enumerate(ranks.endpoints):
        scrape = Metrics(kv_usage=0.1 * rank, blocks=1000, block_size=16, scraped_at=1.0, freshness=Freshness.FRESH)
        endpoint.publish(scrape, 0)
    seen: list[float] = []
    monkeypatch.setattr(Rates, "set_cached", lambda rates, tokens: seen.append(tokens))
    for model in ranks.models:
        model.catch_up(1.0)
    assert seen == pytest.approx([0.15 * 16_000])


@pytest.mark.parametrize("together", [True, False])
def test_a_rank_with_more_recent_work_than_the_others_costs_more_where_ranks_step_together(together: bool) -> None:
    ranks = Ranks(together=together)
    ranks.work()
    busy, now = ranks.models[1], ranks.now
    request = InferenceRequest("r", "/", "m")
    for _ in range(2):
        attempt = Attempt(request, Decision(busy.endpoint), busy.endpoint, 0, now)
        work = busy.dispatch(attempt, 20_000.0, 20_000.0, now)
        busy.end(work, now)
    busy.catch_up(now)
    seconds, share = busy.worked(now), ranks.lockstep.share
    assert seconds == pytest.approx(40_000 * busy.own[1], rel=0.01)
    expected = [WORK_PRICE * share * seconds * (rank - 0.25) for rank in (0, 1, 0, 0)]
    assert ranks.charged(0.0) == pytest.approx(expected)
    assert busy.worked(now + 5 * WORK_SECONDS) < 0.01 * seconds


def test_independent_ranks_are_not_charged_for_each_other() -> None:
    ranks = Ranks(together=False)
    ranks.work(3)
    assert ranks.charged(1000.0) == [0.0] * 4


def test_while_ranks_always_compute_prompts_one_more_delays_nothing_elsewhere() -> None:
    ranks = Ranks(together=True)
    ranks.work()
    ranks.lockstep.busy = 1.0
    assert ranks.lockstep.elsewhere(ranks.models[0]) == 0.0


def test_only_ranks_of_one_pod_share_observations() -> None:
    producer = PredictedLatencyProducer(InstanceName("p"), ManualClock(), PluginState())
    ranks = [Endpoint(f"a/{rank}", rank=rank) for rank in range(2)]
    other, plain = [Endpoint(f"b/{rank}", rank=rank) for rank in range(2)], Endpoint("c")
    join_ranks(ranks)
    join_ranks(other)
    first, second, third, last = producer.known((*ranks, other[0], plain), 0.0)
    assert first.lockstep is second.lockstep is not None
    assert third.lockstep not in (None, first.lockstep)
    assert last.lockstep is None
    producer.endpoint_removed(ranks[1])
    assert first.lockstep is not None
    assert first.lockstep.models == [first]
    assert producer.known((ranks[0], plain), 0.0)[0] is first
