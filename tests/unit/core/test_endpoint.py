"""A pod as scorers see it: the scrape, shifted by what happened since."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, LoadView, Metrics

counts = st.integers(0, 50)


def scraped(waiting: int, running: int) -> Endpoint:
    endpoint = Endpoint("pod")
    endpoint.charge(10, 0)
    endpoint.publish(Metrics(waiting=waiting, running=running, kv_usage=0.5, freshness=Freshness.FRESH), 10)
    return endpoint


def test_right_after_a_scrape_the_view_is_the_scrape() -> None:
    assert scraped(3, 7).view == LoadView(3, 7, 0.5)


def test_requests_sent_while_none_waits_run_and_otherwise_wait() -> None:
    idle, queued = scraped(0, 7), scraped(3, 7)
    for endpoint in (idle, queued):
        endpoint.charge(2, 0)
    assert (idle.view, queued.view) == (LoadView(0, 9, 0.5), LoadView(5, 7, 0.5))


def test_ended_requests_reduce_the_queue_first_and_then_the_running_ones() -> None:
    endpoint = scraped(2, 7)
    endpoint.charge(-5, 0)
    assert endpoint.view == LoadView(0, 4, 0.5)


@given(waiting=counts, running=counts, sent=counts, done=counts)
def test_the_view_is_never_negative_and_counts_every_request(waiting: int, running: int, sent: int, done: int) -> None:
    endpoint = scraped(waiting, running)
    endpoint.charge(sent, 0)
    endpoint.charge(-done, 0)
    view = endpoint.view
    assert view.waiting >= 0
    assert view.running >= 0
    assert view.waiting + view.running == max(0, waiting + running + sent - done)


def test_a_stale_pod_has_only_the_ledgers_load() -> None:
    endpoint = scraped(9, 9)
    endpoint.publish(Metrics(waiting=9, running=9, kv_usage=0.5), 10)
    assert endpoint.view == LoadView(0, 10, 0.5)
    endpoint.charge(-8, 0)
    assert endpoint.view == LoadView(0, 2, 0.5)


def test_a_pod_made_with_metrics_and_load_was_scraped_under_this_load() -> None:
    metrics = Metrics(waiting=3, running=7, kv_usage=0.5, freshness=Freshness.FRESH)
    endpoint = Endpoint("pod", metrics=metrics, load=Load(requests=4))
    assert endpoint.view == LoadView(3, 7, 0.5)
    endpoint.charge(1, 0)
    assert endpoint.view == LoadView(4, 7, 0.5)


def test_role_and_label_are_the_same_value() -> None:
    assert Endpoint("a", labels={"llm-d.ai/role": "decode"}).role == "decode"
    assert Endpoint("b", role="decode", labels={"x": "y"}).labels == {"x": "y", "llm-d.ai/role": "decode"}


def test_a_returning_pod_is_a_new_one() -> None:
    assert Endpoint("a") != Endpoint("a")


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight", 9.0), ("labels", {}), ("metrics", Metrics(waiting=9)), ("state", EndpointState.GONE)],
)
def test_a_plugin_cannot_assign_to_an_endpoint(field: str, value: Any) -> None:
    pod = Endpoint("a", labels={"zone": "x"}, weight=2.0)
    before = getattr(pod, field)
    with pytest.raises(FrozenInstanceError):
        setattr(pod, field, value)
    assert getattr(pod, field) is before


def test_a_plugin_cannot_change_labels_metrics_or_load() -> None:
    labels, attributes = {"zone": "x"}, {"gpu": 0.5}
    pod = Endpoint("a", labels=labels, metrics=Metrics(attributes=attributes))
    with pytest.raises(TypeError):
        pod.labels["zone"] = "y"  # type: ignore[index]
    with pytest.raises(TypeError):
        pod.metrics.attributes["gpu"] = 1.0  # type: ignore[index]
    for field in ("requests", "tokens", "recent", "remote_requests"):
        with pytest.raises(FrozenInstanceError):
            setattr(pod.load, field, 7)
    assert (dict(pod.labels), dict(pod.metrics.attributes), pod.load) == (labels, attributes, Load())
