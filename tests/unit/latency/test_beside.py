"""Pods that do not compute prompts in turn."""

from heapq import heappop, heappush

import pytest

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Freshness, Metrics
from proxy.latency.beside import Beside
from proxy.latency.fleet import FleetModel
from proxy.latency.rates import Rates
from proxy.latency.work import Guess, Leg, Told
from tests.helpers.latency.pods import Pod, answer


class SideBySide(Pod):
    """Who runs is computed in `fixed` + `per_token` each times `load`, whoever runs beside him; of `places`, if there
    are any, one must be free. `in_turn` of its seconds are computed one after the other all the same."""

    places = 1_000
    in_turn = 0.0

    def play(self, requests: int, rate: float, most: int = 8000) -> None:
        """At random times; answers end with their first token."""
        ends: list[tuple[float, int, Attempt, Leg]] = []
        free = self.now
        for at in range(requests):
            arrival = self.now + self._random.expovariate(rate)
            self.finish(ends, arrival)
            self.now = arrival
            tokens = self._random.randrange(100, most)
            attempt = self.send(tokens)
            self.model.catch_up(self.now)
            leg = self.model.dispatch(attempt, tokens, tokens, self.now)
            start = self.now if len(ends) < self.places else sorted(ends)[-self.places][0]
            takes = self.takes(tokens)
            free = max(free, start) + self.in_turn * takes
            heappush(ends, (max(free, start) + (1.0 - self.in_turn) * takes, at, attempt, leg))
            running = min(len(ends), self.places)
            scrape = Metrics(len(ends) - running, running, scraped_at=self.now, freshness=Freshness.FRESH)
            self.endpoint.publish(scrape, len(ends))
        self.finish(ends, float("inf"))
        self.now += 1.0
        self.endpoint.publish(Metrics(scraped_at=self.now, freshness=Freshness.FRESH), 0)
        self.model.catch_up(self.now)

    def finish(self, ends: list[tuple[float, int, Attempt, Leg]], until: float) -> None:
        while ends and ends[0][0] <= until:
            self.now, _, attempt, leg = heappop(ends)
            answer(attempt, self.now)
            self.endpoint.charge(-1, -int(leg.tokens))
            self.model.end(leg, self.now)


def test_a_pod_that_computes_prompts_side_by_side_is_found_out() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    assert pod.model.beside.share == 0.0
    assert pod.error() < 0.05
    pod.model.dispatch(pod.send(30_000), 30_000, 30_000, pod.now)
    assert pod.error() < 0.05


def test_a_pod_that_computes_in_turn_is_never_taken_for_one_that_does_not() -> None:
    pod = Pod()
    pod.noise = 0.3
    shares = []
    for _ in range(40):
        pod.work(5)
        shares.append(pod.model.beside.share)
    assert min(shares[10:]) > 0.5
    assert sum(shares) / len(shares) > 0.9


def test_a_pod_in_between_is_foretold_too() -> None:
    pod = SideBySide(FleetModel())
    pod.in_turn = 0.5
    pod.play(300, rate=2.0)
    for _ in range(2):
        pod.model.dispatch(pod.send(8000), 8000, 8000, pod.now)
    shared = 3 * 0.5 * pod.takes(8000) + 0.5 * pod.takes(8000)
    assert pod.model.beside.share < 1.0
    assert pod.ttft(8000, pod.now) == pytest.approx(shared, rel=0.4)


def test_who_finds_no_place_waits_for_one() -> None:
    pod = SideBySide()
    pod.places = 4
    pod.play(300, rate=8.0)
    idle = pod.ttft(1000, pod.now)
    waits = []
    for waiting in (0, 4, 8):
        pod.now += 1.0
        pod.endpoint.publish(Metrics(waiting, 4, scraped_at=pod.now, freshness=Freshness.FRESH), 0)
        waits.append(pod.ttft(1000, pod.now) - idle)
    mean = pod.fixed + 4000 * pod.per_token
    assert waits == [pytest.approx((place / 4) * mean, rel=0.5) for place in (1, 5, 9)]


def test_who_finds_no_room_in_the_cache_waits_as_long_as_he_needs_room() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    full = Metrics(2, 4, kv_usage=0.99, blocks=1000, block_size=16, scraped_at=pod.now, freshness=Freshness.FRESH)
    before = pod.ttft(8000, pod.now) - pod.ttft(500, pod.now)
    pod.endpoint.publish(full, 0)
    assert pod.ttft(8000, pod.now) - pod.ttft(500, pod.now) > 1.3 * before


def test_a_pod_that_is_new_is_taken_to_be_of_the_form_of_the_others() -> None:
    fleet = FleetModel()
    SideBySide(fleet).play(200, rate=4.0)
    new = SideBySide(fleet)
    assert new.model.beside.share < 0.5


def test_a_pod_that_turns_to_another_form_is_found_out() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    pod.in_turn = 1.0
    pod.play(100, rate=2.0)
    assert pod.model.beside.share > 0.8
    pod.model.dispatch(pod.send(8000), 8000, 8000, pod.now)
    assert pod.ttft(8000, pod.now) == pytest.approx(2 * pod.takes(8000), rel=0.2)


def test_answers_that_are_not_streamed_wait_their_time_whatever_the_form() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    attempt = pod.send(8000, stream=False)
    pod.model.dispatch(attempt, 8000, 8000, pod.now)
    pod.model.catch_up(pod.now + 0.1)
    assert len(pod.model.legs) == 1


def test_who_waits_where_more_have_run_waits_for_blocks_and_not_for_a_place() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    idle = pod.ttft(1000, pod.now)
    for waiting, running in ((1, 16), (4, 5)):
        pod.now += 1.0
        scrape = Metrics(
            waiting, running, kv_usage=0.7, blocks=25_000, block_size=16, scraped_at=pod.now, freshness=Freshness.FRESH
        )
        pod.endpoint.publish(scrape, 0)
    assert pod.ttft(1000, pod.now) == pytest.approx(idle, rel=0.5)


def test_a_pod_that_was_misjudged_and_is_avoided_is_taken_to_be_like_the_others_again() -> None:
    fleet = FleetModel()
    misjudged, other = SideBySide(fleet), SideBySide(fleet)
    misjudged.in_turn = 1.0
    misjudged.play(60, rate=2.0)
    other.play(400, rate=4.0)
    assert misjudged.model.beside.share == 1.0
    for _ in range(40):
        misjudged.now += 1.0
        other.play(1, rate=1.0)
        misjudged.endpoint.publish(Metrics(scraped_at=misjudged.now, freshness=Freshness.FRESH), 0)
        misjudged.model.catch_up(misjudged.now)
    assert misjudged.model.beside.share == 0.0


def test_a_form_holds_for_lines_as_long_as_those_that_have_shown_it() -> None:
    fleet = FleetModel()
    beside = Beside(fleet, Rates(fleet))
    told = Told(1.0, (1.0, 1.0, 0.0))
    for _ in range(10):
        beside.take(Guess(1, 2.0, told, told), 1.0)
    assert [beside.share_with(legs) for legs in (1, 4)] == [0.0, 0.0]
    assert beside.share_with(40) == pytest.approx(0.9)
    beside.take(Guess(19, 20.0, told, told), 1.0)
    assert beside.share_with(40) == 0.0
    for _ in range(60):
        beside.take(Guess(9, 10.0, told, told), 10.0)
    assert beside.share_with(40) == 1.0


def test_a_pod_that_looks_as_if_a_line_cost_nothing_does_not_get_all_there_is() -> None:
    pod = SideBySide()
    pod.play(200, rate=4.0)
    assert pod.model.beside.share == 0.0
    alone = pod.ttft(1000, pod.now)
    for _ in range(100):
        pod.model.dispatch(pod.send(1000), 1000, 1000, pod.now)
        pod.model.catch_up(pod.now)
    assert pod.ttft(1000, pod.now) > 20 * alone
