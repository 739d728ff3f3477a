"""Pods that divide themselves among prompts."""

import pytest

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Freshness, Metrics
from proxy.latency.pod import Work
from proxy.latency.rates import FleetModel
from tests.helpers.latency.pods import Pod, respond

RATE = 1.7
"""Prompts a second: two thirds of what a pod can do."""

TURN = 200.0
"""Tokens that are computed of a prompt before it is another's turn."""


class Divided(Pod):
    """Prompts alternate for a few tokens each, `per_token` seconds a token; responses end with their first token."""

    def play(self, requests: int, rate: float, most: int = 8000) -> None:
        line: list[tuple[Attempt, Work, float]] = []
        arrival = self.now + self._random.expovariate(rate)
        while requests or line:
            if requests and (not line or arrival <= self.now):
                self.now = max(self.now, arrival)
                line.append(self.start(self._random.randrange(100, most)))
                requests -= 1
                arrival += self._random.expovariate(rate)
                continue
            attempt, work, left = line.pop(0)
            self.now += min(TURN, left) * self.per_token
            if left > TURN:
                line.append((attempt, work, left - TURN))
            else:
                self.finish(attempt, work)
        self.now += 1.0
        self.model.catch_up(self.now)

    def start(self, tokens: int) -> tuple[Attempt, Work, float]:
        self.endpoint.publish(Metrics(scraped_at=self.now, freshness=Freshness.FRESH), self.endpoint.load.requests)
        self.model.catch_up(self.now)
        attempt = self.send(tokens)
        return attempt, self.model.dispatch(attempt, tokens, tokens, self.now), tokens

    def finish(self, attempt: Attempt, work: Work) -> None:
        respond(attempt, self.now)
        self.endpoint.charge(-1, -int(work.tokens))
        self.model.end(work, self.now)


def divided(fleet: FleetModel | None = None) -> Divided:
    pod = Divided(fleet)
    pod.play(300, rate=RATE)
    return pod


def test_a_pod_that_shares_itself_between_prompts_is_detected() -> None:
    pod = divided()
    assert pod.fleet.in_turn == 0.0
    alone = 4000 * pod.per_token
    assert 0.9 * alone < pod.ttft(4000, pod.now) < alone / (1.0 - RATE * 4000 * pod.per_token)  # with later arrivals


def test_a_short_prompt_waits_for_its_own_length_of_a_long_one() -> None:
    pod = divided()
    idle = {tokens: pod.ttft(tokens, pod.now) for tokens in (4000, 40_000)}
    pod.start(30_000)
    waits = {tokens: pod.ttft(tokens, pod.now) - alone for tokens, alone in idle.items()}
    assert waits[4000] < 2 * 4000 * pod.per_token
    assert waits[40_000] > 4 * waits[4000]


def test_all_prompts_wait_for_short_ones() -> None:
    pod = divided()
    idle = {tokens: pod.ttft(tokens, pod.now) for tokens in (4000, 40_000)}
    pod.start(1000)
    waits = [pod.ttft(tokens, pod.now) - alone for tokens, alone in idle.items()]
    assert waits[0] == pytest.approx(waits[1])
    assert waits[0] > 0.25 * 1000 * pod.per_token


def test_a_new_pod_is_assumed_to_be_like_the_others() -> None:
    fleet = FleetModel()
    pod = divided(fleet)
    new = Divided(fleet)
    new.play(12, rate=RATE)
    assert new.ttft(4000, new.now) == pytest.approx(pod.ttft(4000, pod.now), rel=0.3)


def test_a_pod_that_computes_in_turn_is_not_mistaken_for_sharing() -> None:
    pod = Pod()
    pod.noise = 0.3
    shares = []
    for _ in range(60):
        pod.work(3)
        shares.append(pod.fleet.in_turn)
    assert sum(shares[10:]) / len(shares[10:]) > 0.9


def test_the_tokens_ahead_depend_on_the_lengths_of_the_queued_prompts() -> None:
    sharing = Pod().model.sharing
    assert sharing.ahead([500, 3000, 1000], 0.0) == (1500, 1)
    assert sharing.ahead([], 20.0) == (20, 0)


def test_a_queue_longer_than_any_seen_counts_more_as_computed_in_turn() -> None:
    fleet = FleetModel()
    for _ in range(2000):
        fleet.observe_discipline(0.5, 1.0)
    assert fleet.in_turn == pytest.approx(0.5, abs=0.01)
    assert fleet.in_turn_of(4) == fleet.in_turn
    assert fleet.in_turn_of(8) == pytest.approx(0.75, abs=0.01)
    fleet.observe_reach(queue=7, is_shared=True)
    assert fleet.in_turn_of(16) == fleet.in_turn
    assert fleet.in_turn_of(32) == pytest.approx(0.75, abs=0.01)
