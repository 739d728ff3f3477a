"""Pods that do not compute prompts in turn."""

from dataclasses import replace
from heapq import heappop, heappush

import pytest

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Freshness, Metrics
from proxy.latency.pod import Work
from proxy.latency.rates import FleetModel
from tests.helpers.latency.pods import Pod, respond


class SideBySide(Pod):
    """A request takes `fixed` + `per_token` each times `load`, whatever else runs; of `places`, if there
    are any, one must be free. `in_turn` of its seconds are still computed one after the other."""

    places = 1_000
    in_turn = 0.0

    def play(self, requests: int, rate: float, most: int = 8000) -> None:
        """At random times; responses end with their first token."""
        ends: list[tuple[float, int, Attempt, Work]] = []
        free = self.now
        for at in range(requests):
            arrival = self.now + self._random.expovariate(rate)
            self.finish(ends, arrival)
            self.now = arrival
            tokens = self._random.randrange(100, most)
            attempt = self.send(tokens)
            self.model.catch_up(self.now)
            work = self.model.dispatch(attempt, tokens, tokens, self.now)
            start = self.now if len(ends) < self.places else sorted(ends)[-self.places][0]
            takes = self.takes(tokens)
            free = max(free, start) + self.in_turn * takes
            heappush(ends, (max(free, start) + (1.0 - self.in_turn) * takes, at, attempt, work))
            running = min(len(ends), self.places)
            scrape = Metrics(len(ends) - running, running, scraped_at=self.now, freshness=Freshness.FRESH)
            self.endpoint.publish(scrape, len(ends))
        self.finish(ends, float("inf"))
        self.now += 1.0
        self.endpoint.publish(Metrics(scraped_at=self.now, freshness=Freshness.FRESH), 0)
        self.model.catch_up(self.now)

    def finish(self, ends: list[tuple[float, int, Attempt, Work]], until: float) -> None:
        while ends and ends[0][0] <= until:
            self.now, _, attempt, work = heappop(ends)
            respond(attempt, self.now)
            self.endpoint.charge(-1, -int(work.tokens))
            self.model.end(work, self.now)


def test_a_pod_that_computes_prompts_in_parallel_is_detected() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    assert pod.fleet.in_turn == 0.0
    assert pod.error() < 0.05
    pod.model.dispatch(pod.send(30_000), 30_000, 30_000, pod.now)
    assert pod.error() < 0.05


def test_a_pod_that_computes_in_turn_is_not_mistaken_for_parallel() -> None:
    pod = Pod()
    pod.noise = 0.3
    shares = []
    for _ in range(40):
        pod.work(5)
        shares.append(pod.fleet.in_turn)
    assert min(shares[10:]) > 0.5
    assert sum(shares) / len(shares) > 0.9


def test_a_pod_in_between_is_predicted() -> None:
    pod = SideBySide(FleetModel())
    pod.in_turn = 0.5
    pod.play(300, rate=2.0)
    for _ in range(2):
        pod.model.dispatch(pod.send(8000), 8000, 8000, pod.now)
    shared = 3 * 0.5 * pod.takes(8000) + 0.5 * pod.takes(8000)
    assert pod.fleet.in_turn < 1.0
    assert pod.ttft(8000, pod.now) == pytest.approx(shared, rel=0.4)


def test_a_request_waits_for_a_slot_when_all_are_in_use() -> None:
    pod = SideBySide()
    pod.places = 4
    pod.play(300, rate=6.0)
    idle = pod.ttft(1000, pod.now)
    waits = []
    for waiting in (0, 4, 8):
        pod.now += 1.0
        pod.endpoint.publish(Metrics(waiting, 4, scraped_at=pod.now, freshness=Freshness.FRESH), 0)
        waits.append(pod.ttft(1000, pod.now) - idle)
    mean = pod.fixed + 4000 * pod.per_token
    assert waits == [pytest.approx((place / 4) * mean, rel=0.5) for place in (1, 5, 9)]


def test_requests_that_wait_while_fewer_run_than_before_do_not_wait_for_a_slot() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    idle = pod.ttft(1000, pod.now)
    for waiting, running in ((1, 16), (4, 5)):
        pod.now += 1.0
        pod.endpoint.publish(Metrics(waiting, running, scraped_at=pod.now, freshness=Freshness.FRESH), 0)
    assert pod.ttft(1000, pod.now) == pytest.approx(idle, rel=0.5)


def test_the_number_of_slots_is_dropped_when_it_is_not_reached() -> None:
    pod = SideBySide()
    pod.places = 4
    pod.play(300, rate=6.0)
    full = Metrics(0, 4, scraped_at=pod.now, freshness=Freshness.FRESH)
    pod.endpoint.publish(full, 0)
    limited = pod.ttft(1000, pod.now)
    for freshness in (Freshness.STALE, Freshness.FRESH):
        pod.endpoint.publish(replace(full, freshness=freshness), 0)
        pod.ttft(1000, pod.now)
    assert pod.ttft(1000, pod.now) < limited - 0.5 * 4000 * pod.per_token / 4


def test_a_new_pod_is_assumed_to_have_the_form_of_the_others() -> None:
    fleet = FleetModel()
    SideBySide(fleet).play(200, rate=4.0)
    new = SideBySide(fleet)
    assert new.fleet.in_turn < 0.5


def test_a_pod_that_changes_its_form_is_detected() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    pod.in_turn = 1.0
    pod.play(100, rate=2.0)
    assert pod.fleet.in_turn > 0.8
    pod.model.dispatch(pod.send(8000), 8000, 8000, pod.now)
    assert pod.ttft(8000, pod.now) == pytest.approx(2 * pod.takes(8000), rel=0.2)


def test_a_prompt_that_overtook_the_first_one_is_not_counted_as_waiting() -> None:
    pod = SideBySide()
    first, second = pod.send(8000), pod.send(100)
    for attempt in (first, second):
        pod.model.dispatch(attempt, attempt.request.prompt.tokens, attempt.request.prompt.tokens, pod.now)
    second.first_byte_at = pod.now + 0.01
    assert list(pod.model._queue_tokens()) == [8000]


def test_complete_responses_wait_for_their_time_in_any_form() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    attempt = pod.send(8000, stream=False)
    pod.model.dispatch(attempt, 8000, 8000, pod.now)
    pod.model.catch_up(pod.now + 0.1)
    assert len(pod.model.queue) == 1


def test_a_pod_whose_queue_seems_free_does_not_get_all_requests() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    assert pod.fleet.in_turn == 0.0
    alone = pod.ttft(1000, pod.now)
    for _ in range(100):
        pod.model.dispatch(pod.send(1000), 1000, 1000, pod.now)
        pod.model.catch_up(pod.now)
    assert pod.ttft(1000, pod.now) > 20 * alone
