"""A fleet in one process, and what others see of it."""

from __future__ import annotations

import math

import pytest

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics, PodTls
from proxy.core.ports import ManualClock
from proxy.fleet.mirror import MessageKind, Mirror, MirroredFleet
from proxy.fleet.settings import PodSettings

METRICS = Metrics(
    waiting=1,
    running=5,
    kv_usage=0.5,
    active_models=frozenset({"lora"}),
    max_active_models=4,
    block_size=16,
    blocks=100,
    attributes={"x": 1.5},
    scraped_at=99.0,
    freshness=Freshness.FRESH,
)


def pod(name: str, **keys: object) -> PodSettings:
    return PodSettings(url=f"http://{name}", name=name, **keys)  # type: ignore[arg-type]


class Pair:
    """An origin and a mirror with unrelated clocks."""

    def __init__(self) -> None:
        self.clock, self.other_clock = ManualClock(100.0), ManualClock(5000.0)
        self.published: list[tuple[MessageKind, bytes]] = []
        self.events: list[tuple[str, str]] = []
        self.origin = MirroredFleet(self.clock, lambda kind, record: self.published.append((kind, record)))
        self.mirror = Mirror(
            self.other_clock,
            on_ready=lambda endpoint: self.events.append(("ready", endpoint.name)),
            on_restarted=lambda endpoint: self.events.append(("restarted", endpoint.name)),
            on_removed=lambda endpoint: self.events.append(("removed", endpoint.name)),
        )

    def tell(self) -> None:
        for kind, record in self.published:
            self.mirror.apply(kind, record)
        self.published.clear()

    def tell_all(self) -> None:
        self.published.clear()
        for kind, record in self.origin.messages():
            self.mirror.apply(kind, record)

    def ready(self, name: str, **keys: object) -> Endpoint:
        endpoint = self.origin.add(pod(name, **keys))
        self.origin.reached(endpoint)
        return endpoint

    def seen(self, name: str) -> Endpoint:
        endpoint = self.mirror.get(name)
        assert endpoint is not None
        return endpoint


def test_a_pod_is_a_candidate_in_the_mirror_when_it_is_one_in_the_origin() -> None:
    pair = Pair()
    endpoint = pair.origin.add(pod("a", labels={"gpu": "h100"}, weight=2.0, role="decode", api_key="k"))
    pair.tell()
    assert pair.seen("a").state is EndpointState.STARTING
    pair.origin.listed(endpoint, [{"id": "m", "parent": None}])
    pair.origin.reached(endpoint)
    pair.tell()
    seen = pair.seen("a")
    assert list(pair.mirror.endpoints_for("m")) == [seen]
    assert pair.mirror.models() == pair.origin.models()
    assert (seen.url, seen.weight, seen.role, seen.api_key) == ("http://a", 2.0, "decode", "k")
    assert seen.labels == endpoint.labels
    assert pair.events == [("ready", "a")]
    pair.origin.refused(endpoint)
    pair.tell()
    assert pair.seen("a").state is EndpointState.EJECTED


def test_a_mirror_connects_to_a_pod_over_tls_like_the_origin() -> None:
    pair = Pair()
    tls = PodTls(ca="ca.pem", server_name="pod.internal")
    assert pair.ready("a", tls=tls).tls == tls
    pair.ready("b")
    pair.tell()
    assert [endpoint.tls for endpoint in pair.mirror.endpoints] == [tls, None]


def test_drains_and_undrains_apply_everywhere() -> None:
    pair = Pair()
    pair.ready("a")
    pair.origin.drain("a")
    pair.tell()
    assert not pair.mirror.ready
    pair.origin.undrain("a")
    pair.tell()
    assert [endpoint.name for endpoint in pair.mirror.ready] == ["a"]


def test_a_removed_pod_leaves_the_mirror_after_the_origin() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    endpoint.charge(1, 0)
    pair.origin.remove("a")
    pair.tell()
    assert pair.seen("a").state is EndpointState.DRAINING
    endpoint.charge(-1, 0)
    pair.origin.sweep()
    pair.tell()
    assert pair.mirror.get("a") is None
    assert pair.events == [("ready", "a"), ("removed", "a")]


def test_a_scrape_has_the_same_age_and_in_flight_in_the_mirror() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    endpoint.publish(METRICS, in_flight=3)
    pair.origin.refreshed(endpoint)
    pair.tell()
    seen = pair.seen("a")
    assert seen.metrics.scraped_at == 4999.0
    assert (seen.metrics.waiting, seen.metrics.blocks, seen.metrics.active_models) == (1, 100, frozenset({"lora"}))
    assert seen.metrics.attributes == {"x": 1.5}
    assert seen.metrics.freshness is Freshness.FRESH
    seen.charge(4, 0)
    assert seen.view.waiting == 2


def test_values_that_json_lacks_survive() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    endpoint.publish(Metrics(attributes={"x": math.nan}, freshness=Freshness.FRESH), 0)
    pair.origin.refreshed(endpoint)
    pair.tell()
    assert math.isnan(pair.seen("a").metrics.attributes["x"])
    assert pair.seen("a").metrics.scraped_at == -math.inf


def test_a_restart_is_received_once_and_not_by_later_mirrors() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    pair.tell()
    pair.origin.restarted(endpoint)
    pair.tell()
    pair.tell_all()
    assert pair.events == [("ready", "a"), ("restarted", "a")]
    late = Pair()
    for kind, record in pair.origin.messages():
        late.mirror.apply(kind, record)
    assert late.events == [("ready", "a")]


def test_a_mirror_that_missed_everything_is_restored_by_all_records() -> None:
    pair = Pair()
    pair.ready("gone")
    pair.ready("kept")
    pair.tell()
    pair.origin.remove("gone")
    pair.ready("new")
    pair.origin.drain("kept")
    pair.tell_all()
    assert {endpoint.name: endpoint.state for endpoint in pair.mirror.endpoints} == {
        endpoint.name: endpoint.state for endpoint in pair.origin.endpoints
    }
    assert ("removed", "gone") in pair.events


def test_unchanged_values_are_not_published() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    pair.published.clear()
    pair.origin.listed(endpoint, ())
    pair.origin.reached(endpoint)
    assert pair.published == []


@pytest.mark.parametrize("record", [b"", b"{]", b"{}", b"[1]", b'{"pod":{},"contact":"ready","restarts":0}'])
@pytest.mark.parametrize("kind", [MessageKind.POD, MessageKind.METRICS])
def test_malformed_records_are_refused_and_change_nothing(kind: MessageKind, record: bytes) -> None:
    pair = Pair()
    pair.ready("a")
    pair.tell()
    with pytest.raises((ValueError, KeyError, TypeError)):
        pair.mirror.apply(kind, record)
    assert [endpoint.name for endpoint in pair.mirror.ready] == ["a"]


def test_a_mirror_knows_lost_requests() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    pair.tell()
    there = pair.mirror.get("a")
    assert there is not None
    pair.other_clock.advance(10.0)
    assert pair.mirror.lost_at(there, 5000.0) is None
    pair.origin.refused(endpoint)
    pair.tell()
    assert pair.mirror.lost_at(there, 5000.0) == 5010.0
    pair.other_clock.advance(2.0)
    pair.origin.restarted(endpoint)
    pair.origin.reached(endpoint)
    pair.tell()
    assert (pair.mirror.lost_at(there, 5000.0), pair.mirror.lost_at(there, 5012.0)) == (5012.0, None)


def test_ejections_at_an_origin_do_not_change_the_reported_state() -> None:
    pair = Pair()
    endpoint = pair.ready("a")
    pair.tell()
    pair.origin.eject(endpoint, "ill")
    assert [kind for kind, _ in pair.published] == []


def test_a_mirror_applies_the_panic_threshold_when_pods_come_and_go() -> None:
    pair = Pair()
    a, b = pair.ready("a"), pair.ready("b")
    pair.tell()
    pair.mirror.eject(pair.seen("a"), "fails")
    assert pair.seen("a").state is EndpointState.EJECTED
    pair.origin.refused(b)
    pair.tell()
    assert pair.seen("a").state is EndpointState.READY, "all pods that respond would be ejected"
    pair.origin.reached(b)
    pair.tell()
    assert pair.seen("a").state is EndpointState.EJECTED
    pair.origin.remove("b")
    pair.tell()
    assert pair.seen("a").state is EndpointState.READY
    assert a.state is EndpointState.READY, "the mirror alone ejects it"


def test_a_pod_of_the_same_name_with_another_uid_is_new_in_mirrors() -> None:
    pair = Pair()
    pair.ready("a", uid="1")
    pair.tell()
    first = pair.mirror.get("a")
    pair.origin.add(pod("a", uid="2"))
    pair.tell()
    second = pair.mirror.get("a")
    assert second is not None
    assert second is not first
    assert second.state is EndpointState.STARTING
    assert pair.events[-1] == ("removed", "a")
