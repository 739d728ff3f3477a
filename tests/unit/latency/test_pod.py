import random

import pytest

from proxy.core.attempt import Ending, Usage
from proxy.core.endpoint import Endpoint, Freshness, Metrics, update
from proxy.latency.pod import STREAMS_RECENT
from proxy.latency.rates import FleetModel
from proxy.latency.sharing import CERTAIN
from tests.helpers.latency.pods import Pod, respond


def test_a_pod_is_learnt_from_its_first_tokens() -> None:
    pod = Pod(per_token=63e-6)
    pod.work(60)
    assert pod.error() < 0.05
    assert pod.error(500) < 0.3


def test_30_percent_of_noise_does_not_mislead() -> None:
    pod = Pod()
    pod.noise = 0.3
    pod.work(150)
    assert pod.error() < 0.2


def test_a_pod_that_becomes_three_times_slower_is_known_after_ten_requests() -> None:
    pod = Pod()
    pod.work(60)
    pod.fixed, pod.per_token = 3 * pod.fixed, 3 * pod.per_token
    assert pod.error() > 0.6
    for _ in range(10):
        pod.serve([4000], gap=0.5)
    assert pod.error() < 0.15


def test_a_single_response_late_by_a_minute_does_not_mislead() -> None:
    pod = Pod()
    pod.work(60)
    per_token, pod.per_token = pod.per_token, 0.015
    pod.serve([4000])
    pod.per_token = per_token
    pod.work(8)
    assert pod.error() < 0.2


def test_an_unknown_pod_is_like_the_others() -> None:
    fleet = FleetModel()
    for _ in range(2):
        Pod(fleet, per_token=300e-6).work(60)
    assert Pod(fleet, per_token=300e-6).error() < 0.1


def test_without_any_observation_the_work_ahead_orders_the_pods() -> None:
    fleet = FleetModel()
    idle, busy, busier = (Pod(fleet) for _ in range(3))
    for pod, tokens in ((busy, 1000), (busier, 2000)):
        pod.model.dispatch(pod.send(tokens), tokens, tokens, 0.0)
    waits = [pod.ttft(500, 0.0) for pod in (idle, busy, busier)]
    assert waits == sorted(waits)
    assert waits[2] - waits[1] == pytest.approx(waits[1] - waits[0], rel=0.5)


def test_the_queue_drains_as_time_passes() -> None:
    pod = Pod()
    pod.work(60)
    pod.model.dispatch(pod.send(10_000), 10_000, 10_000, pod.now)
    assert pod.wait(pod.now) == pytest.approx(1.02, rel=0.1)
    assert pod.wait(pod.now + 0.5) == pytest.approx(0.52, rel=0.2)


def test_an_overdue_response_delays_the_queue_behind_it() -> None:
    pod = Pod()
    pod.work(60)
    pod.model.dispatch(pod.send(1000), 1000, 1000, pod.now)
    pod.model.dispatch(pod.send(5000), 5000, 5000, pod.now)
    behind = 0.5
    assert pod.wait(pod.now + 2.0) > behind + 0.5
    assert pod.wait(pod.now + 20.0) > behind + 5.0


def test_a_first_token_corrects_the_remaining_work() -> None:
    pod = Pod()
    pod.work(60)
    first = pod.send(10_000)
    pod.model.dispatch(first, 10_000, 10_000, pod.now)
    pod.model.dispatch(pod.send(5000), 5000, 5000, pod.now)
    first.status, first.first_byte_at = 200, pod.now + 0.1
    pod.model.catch_up(pod.now + 0.1)
    assert pod.wait(pod.now + 0.1) == pytest.approx(0.52, rel=0.25)


def test_a_failed_attempt_leaves_the_queue_and_is_not_learnt_from() -> None:
    pod = Pod()
    before = pod.ttft(1000, 0.0)
    attempt = pod.send(100_000)
    work = pod.model.dispatch(attempt, 100_000, 100_000, 0.0)
    attempt.ending = Ending.UPSTREAM_FAILED
    pod.endpoint.charge(-1, -100_000)
    pod.model.end(work, 30.0)
    pod.model.catch_up(30.0)
    assert not pod.model.queue
    assert not pod.model.rates.prefill.observed
    assert pod.ttft(1000, 30.0) == pytest.approx(before)


def test_an_immediate_error_does_not_make_a_pod_seem_fast() -> None:
    pod = Pod()
    pod.work(60)
    for _ in range(20):
        attempt = pod.send(8000)
        work = pod.model.dispatch(attempt, 8000, 8000, pod.now)
        respond(attempt, pod.now + 0.001)
        attempt.status = 500
        pod.endpoint.charge(-1, -8000)
        pod.now += 0.01
        pod.model.end(work, pod.now)
    pod.model.catch_up(pod.now)
    assert pod.error() < 0.05


def test_complete_responses_are_assumed_to_be_on_time() -> None:
    pod = Pod()
    pod.work(60)
    pod.model.dispatch(pod.send(10_000, stream=False), 10_000, 10_000, pod.now)
    pod.model.catch_up(pod.now + 0.5)
    assert len(pod.model.queue) == 1
    pod.model.catch_up(pod.now + 2.0)
    assert not pod.model.queue


def test_a_slow_pod_is_detected_by_complete_responses() -> None:
    fleet = FleetModel()
    quick, slow = Pod(fleet), Pod(fleet, fixed=0.06, per_token=300e-6)
    for pod in (quick, slow):
        for _ in range(20):
            attempt = pod.send(4000, stream=False)
            work = pod.model.dispatch(attempt, 4000, 4000, pod.now)
            pod.now += pod.takes(4000)
            respond(attempt, pod.now)
            pod.endpoint.charge(-1, -4000)
            pod.model.end(work, pod.now)
            pod.now += 0.5
            pod.model.catch_up(pod.now)
    assert slow.ttft(4000, slow.now) == pytest.approx(1.26, rel=0.1)
    assert quick.ttft(4000, quick.now) == pytest.approx(0.42, rel=0.1)


def complete(pod: Pod, prompt: int, tokens: int, pace: float) -> None:
    """A response that arrives as a whole."""
    attempt = pod.send(prompt, stream=False)
    work = pod.model.dispatch(attempt, prompt, prompt, pod.now)
    pod.now += pod.takes(prompt) + tokens * pace
    respond(attempt, pod.now, tokens)
    pod.endpoint.charge(-1, -prompt)
    pod.model.end(work, pod.now)
    pod.now += 0.5
    pod.model.catch_up(pod.now)


def test_complete_responses_show_the_time_of_prompts_and_of_tokens() -> None:
    pod, sizes = Pod(per_token=50e-6), random.Random(1)
    for _ in range(100):
        complete(pod, sizes.randrange(1000, 20_000), sizes.randrange(10, 400), pace=0.006)
    assert pod.ttft(10_000, pod.now) == pytest.approx(0.52, rel=0.15)
    assert pod.tpot() == pytest.approx(0.006, rel=0.15)


def test_a_slow_pod_is_detected_by_embeddings() -> None:
    fleet = FleetModel()
    slow, quick = Pod(fleet, per_token=300e-6), Pod(fleet)
    for _ in range(60):
        for pod in (slow, quick):
            complete(pod, 2000, 0, pace=0.0)
    assert slow.ttft(4000, slow.now) == pytest.approx(1.22, rel=0.1)
    assert quick.ttft(4000, quick.now) == pytest.approx(0.42, rel=0.1)


def test_complete_responses_teach_nothing_soon_after_streams() -> None:
    pod = Pod()
    pod.work(60)
    expected = pod.ttft(4000, pod.now)
    complete(pod, 4000, 10, pace=0.2)
    assert pod.ttft(4000, pod.now) == expected
    pod.now += STREAMS_RECENT
    complete(pod, 4000, 10, pace=0.2)
    assert pod.ttft(4000, pod.now) > expected


def test_prompts_that_finish_in_the_same_step_are_one_observation() -> None:
    pod = Pod(per_token=0.0)
    for _ in range(60):
        sent = [pod.send(200) for _ in range(4)]
        works = [pod.model.dispatch(one, 200, 200, pod.now) for one in sent]
        pod.now += 0.1
        for attempt, work in zip(sent, works, strict=True):
            respond(attempt, pod.now)
            pod.endpoint.charge(-1, -200)
            pod.model.end(work, pod.now)
        pod.now += 0.5
        pod.model.catch_up(pod.now)
    assert pod.ttft(800, pod.now) == pytest.approx(0.1, rel=0.2)


def test_the_time_per_token_and_its_growth_are_learnt() -> None:
    pod = Pod()
    for running in [1, 8] * 60:
        sent = [pod.send(10) for _ in range(running)]
        works = [pod.model.dispatch(one, 10, 10, pod.now) for one in sent]
        for attempt in sent:
            attempt.status, attempt.first_byte_at = 200, pod.now
        pod.model.catch_up(pod.now)
        pod.now += 99 * (0.010 + 0.001 * running)
        for attempt, work in zip(sent, works, strict=True):
            attempt.last_byte_at, attempt.ending, attempt.usage = pod.now, Ending.COMPLETE, Usage(10, 100)
            pod.model.end(work, pod.now)
        for _ in sent:
            pod.endpoint.charge(-1, -10)
        pod.model.catch_up(pod.now)
    assert pod.tpot() == pytest.approx(0.011, rel=0.15)
    for _ in range(7):
        pod.endpoint.charge(1, 10)
    pod.model.catch_up(pod.now)
    assert pod.tpot() == pytest.approx(0.018, rel=0.15)


def test_waiting_requests_of_other_clients_are_ahead() -> None:
    endpoint = Endpoint("pod", metrics=Metrics(waiting=5, running=10, freshness=Freshness.FRESH))
    pod = Pod(endpoint=endpoint)
    assert pod.wait(0.0) > 0.4
    pod = Pod()
    for _ in range(3):
        pod.model.dispatch(pod.send(1000), 1000, 1000, 0.0)
    ours = pod.wait(0.1)
    pod.endpoint.publish(Metrics(waiting=3, scraped_at=0.1, freshness=Freshness.FRESH), 3)
    pod.model.catch_up(0.1)
    assert pod.wait(0.1) == pytest.approx(ours, abs=0.01)


def test_prompts_of_siblings_are_ahead() -> None:
    pod = Pod()
    before = pod.ttft(100, 0.0)
    pod.endpoint.charge(1, 5000)
    update(pod.endpoint.load, remote_requests=1, remote_tokens=5000)
    pod.model.catch_up(0.0)
    assert pod.ttft(100, 0.0) > before + 0.4


def test_the_error_is_0_until_enough_is_known() -> None:
    fleet = FleetModel()
    for _ in range(19):
        fleet.observe_error(2.0, 1.0)
    assert fleet.error == 0.0
    fleet.observe_error(2.0, 1.0)
    assert fleet.error == pytest.approx(1.0, abs=0.02)


def test_a_busy_pod_is_learnt_from_at_a_limited_rate() -> None:
    pod = Pod(fixed=0.001, per_token=2e-6)
    for _ in range(600):
        pod.serve([1000])
    assert pod.now < 10.0
    assert pod.model.rates.prefill.observed < 100
    assert pod.ttft(1000, pod.now) == pytest.approx(0.003, abs=0.001)


def test_initial_guesses_are_not_scored() -> None:
    fleet = FleetModel()
    pod = Pod(fleet, per_token=5e-6)
    pod.work(30)
    assert fleet.compared > 20
    assert fleet.error < 0.5


def test_an_error_of_milliseconds_is_ignored() -> None:
    fleet = FleetModel()
    for _ in range(30):
        fleet.observe_error(0.001, 0.008)
    assert fleet.error == 0.0


def test_a_complete_response_is_in_the_queue_until_its_predicted_end() -> None:
    pod = Pod()
    attempts = [pod.send(5000, stream=False) for _ in range(3)]
    for attempt in attempts:
        pod.model.dispatch(attempt, 5000, 5000, 0.0)
    waits = [pod.wait(at) for at in (0.0, 0.6, 1.2, 2.0)]
    assert waits == [pytest.approx(wait, abs=0.1) for wait in (1.5, 0.9, 0.3, 0.0)]


def test_a_complete_response_leaves_the_queue_at_its_end() -> None:
    pod = Pod()
    attempt = pod.send(5000, stream=False)
    work = pod.model.dispatch(attempt, 5000, 5000, 0.0)
    respond(attempt, 0.1)
    pod.endpoint.charge(-1, -5000)
    pod.model.end(work, 0.1)
    assert not pod.model.queue
    assert pod.wait(0.1) == 0.0


def scraped(pod: Pod, seconds: int, other: Pod | None = None) -> None:
    """So many seconds pass in which the pod gets nothing, while the other one works or none does."""
    for _ in range(seconds):
        pod.now += 1.0
        pod.endpoint.publish(Metrics(scraped_at=pod.now, freshness=Freshness.FRESH), 0)
        pod.model.catch_up(pod.now)
        if other is not None:
            other.work(1)


def test_an_avoided_slow_pod_is_tried_again_while_others_work() -> None:
    fleet = FleetModel()
    slow, other = Pod(fleet), Pod(fleet)
    slow.work(20)
    other.work(20)
    slow.per_token *= 5
    slow.work(6)
    assert slow.ttft(4000, slow.now) > 2.5 * other.ttft(4000, other.now)
    scraped(slow, 90, other)
    assert slow.ttft(4000, slow.now) < 1.5 * other.ttft(4000, other.now)
    slow.work(1)
    assert slow.ttft(4000, slow.now) > 2.5 * other.ttft(4000, other.now), "one request says that it is slow still"


def test_pods_of_two_kinds_are_distinguished_after_a_night() -> None:
    fleet = FleetModel()
    slow, other = Pod(fleet, per_token=300e-6), Pod(fleet)
    slow.work(40)
    other.work(40)
    before = slow.ttft(4000, slow.now)
    scraped(slow, 300)
    assert slow.ttft(4000, slow.now) == pytest.approx(before, rel=0.01)


SLOTS = 4


def limited(scrapes: int) -> Pod:
    """A pod after this many scrapes in which all slots were taken, each after a response had ended."""
    pod = Pod()
    pod.work(10)
    for _ in range(scrapes):
        pod.serve([1000], gap=0.5)
        scrape(pod, SLOTS, waiting=1)
    return pod


def scrape(pod: Pod, running: int, waiting: int = 0, freshness: Freshness = Freshness.FRESH) -> None:
    pod.now += 1.0
    pod.endpoint.publish(Metrics(waiting, running, scraped_at=pod.now, freshness=freshness), pod.endpoint.load.requests)
    pod.model.catch_up(pod.now)


def test_a_request_waits_for_a_slot_of_a_pod_that_is_certainly_full() -> None:
    pod = limited(CERTAIN)
    scrape(pod, SLOTS - 1)
    assert pod.wait(pod.now) < pod.model.step
    scrape(pod, SLOTS)
    response = pod.fleet.output * pod.model.step
    assert pod.wait(pod.now) == pytest.approx(response / SLOTS, rel=0.1)
    scrape(pod, SLOTS + 1)  # it has more
    assert pod.wait(pod.now) < pod.model.step


@pytest.mark.parametrize("upset", ["no response ends", "fewer run", "stale"])
def test_a_pod_is_not_certainly_full_after(upset: str) -> None:
    pod = limited(CERTAIN - 1 if upset != "stale" else CERTAIN)
    match upset:
        case "no response ends":
            for _ in range(CERTAIN):
                scrape(pod, SLOTS, waiting=1)
        case "fewer run":
            scrape(pod, SLOTS - 1, waiting=1)
            pod.serve([1000])
            scrape(pod, SLOTS, waiting=1)
        case _:
            scrape(pod, SLOTS, freshness=Freshness.STALE)
    scrape(pod, SLOTS)
    assert pod.wait(pod.now) < pod.model.step


def test_what_waits_for_a_slot_does_not_show_the_speed_of_prefills() -> None:
    pod = limited(CERTAIN)
    before = pod.model.own
    for _ in range(8):
        pod.now += 0.5
        attempt = pod.send(4000)
        work = pod.model.dispatch(attempt, 4000, 4000, pod.now)
        scrape(pod, SLOTS, waiting=1)
        pod.now += 4.0
        respond(attempt, pod.now)
        pod.model.catch_up(pod.now)
        pod.endpoint.charge(-1, -4000)
        pod.model.end(work, pod.now)
    assert pod.model.own[1:] == pytest.approx(before[1:], rel=0.1)
