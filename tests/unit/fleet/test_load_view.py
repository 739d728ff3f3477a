"""The scrape, shifted by what was dispatched and finished since it was sent."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint, Freshness, LoadView, Metrics

COUNTS = st.integers(0, 50)


def scraped(waiting: int, running: int, in_flight: int = 0) -> Endpoint:
    pod = Endpoint("a")
    pod.charge(in_flight, 0)
    pod.publish(Metrics(waiting=waiting, running=running, kv_usage=0.5, freshness=Freshness.FRESH), in_flight)
    return pod


def test_right_after_a_scrape_the_view_is_the_scrape() -> None:
    assert scraped(3, 4, in_flight=7).view == LoadView(3, 4, 0.5)


def test_dispatches_run_while_none_waits() -> None:
    pod = scraped(0, 4)
    pod.charge(2, 0)
    assert pod.view == LoadView(0, 6, 0.5)


def test_dispatches_wait_while_others_wait() -> None:
    pod = scraped(1, 4)
    pod.charge(2, 0)
    assert pod.view == LoadView(3, 4, 0.5)


def test_ended_requests_let_waiting_ones_run_and_then_empty_the_pod() -> None:
    pod = scraped(2, 4, in_flight=6)
    pod.charge(-3, 0)
    assert pod.view == LoadView(0, 3, 0.5)


def test_running_requests_are_never_negative() -> None:
    pod = scraped(0, 1, in_flight=5)
    pod.charge(-5, 0)
    assert pod.view == LoadView(0, 0, 0.5)


def test_a_stale_pod_has_only_the_ledgers_load() -> None:
    pod = Endpoint("a")
    pod.charge(3, 0)
    pod.publish(Metrics(waiting=9, running=9, kv_usage=0.5, freshness=Freshness.STALE), 0)
    assert pod.view == LoadView(0, 3, 0.5)
    pod.charge(1, 0)
    assert pod.view == LoadView(0, 4, 0.5)


def test_a_burst_between_two_scrapes_is_counted_at_once() -> None:
    pods = [scraped(0, 0), scraped(0, 0)]
    for _ in range(10):
        target = min(pods, key=lambda pod: pod.view.running)
        target.charge(1, 0)
    assert [pod.view.running for pod in pods] == [5, 5]


@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
def test_the_view_shifts_by_the_changes_since_the_scrape(w: int, r: int, before: int, sent: int, done: int) -> None:
    pod = scraped(w, r, in_flight=before)
    for _ in range(sent):
        pod.charge(1, 0)
    pod.charge(-done, 0)
    view = pod.view
    assert view.waiting >= 0
    assert view.waiting + view.running == max(0, w + r + sent - done)
