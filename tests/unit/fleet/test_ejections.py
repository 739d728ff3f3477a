"""Ejection of pods that respond."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from proxy.core.endpoint import EndpointState
from proxy.core.ports import ManualClock
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from tests.unit.fleet.test_store import Calls, pod, state


def names(calls: Calls) -> str:
    return "".join(endpoint.name for endpoint in calls.fleet.ready)


def test_a_pod_with_an_ejection_reason_gets_no_requests() -> None:
    calls = Calls()
    a, *_ = (calls.ready(name) for name in "abc")
    calls.fleet.eject(a, "slow")
    calls.fleet.eject(a, "ill")
    assert (names(calls), calls.fleet.ejection_reasons(a)) == ("bc", ["ill", "slow"])
    calls.fleet.uneject(a, "slow")
    assert names(calls) == "bc"
    calls.fleet.uneject(a, "ill")
    assert (names(calls), calls.fleet.ejection_reasons(a)) == ("abc", [])


def test_the_end_of_an_ejection_is_logged_with_its_reason_as_past(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    a, *_ = (calls.ready(name) for name in "abc")
    caplog.set_level(logging.INFO, "proxy.fleet.records")
    calls.fleet.eject(a, "fails its health checks")
    calls.fleet.uneject(a, "fails its health checks")
    assert caplog.messages == [
        "pod a ejected: fails its health checks",
        "pod a no longer ejected; the reason was: fails its health checks",
    ]


def test_ejections_of_more_than_half_of_the_pods_are_ignored() -> None:
    calls = Calls()
    pods = [calls.ready(name) for name in "abcd"]
    for endpoint in pods[:2]:
        calls.fleet.eject(endpoint, "ill")
    assert names(calls) == "cd"
    calls.fleet.eject(pods[2], "ill")
    assert (names(calls), calls.fleet.panics) == ("abcd", True)
    calls.fleet.uneject(pods[0], "ill")
    assert (names(calls), calls.fleet.panics) == ("ad", False)


def test_added_and_removed_pods_change_the_panic_threshold() -> None:
    calls = Calls()
    a, b = calls.ready("a"), calls.ready("b")
    calls.fleet.eject(a, "ill")
    assert names(calls) == "b"
    calls.fleet.refused(b)
    assert names(calls) == "a", "the only one that responds"
    calls.fleet.reached(b)
    assert names(calls) == "b"
    calls.fleet.drain("b")
    assert names(calls) == "a"
    calls.fleet.undrain("b")
    calls.fleet.remove("b")
    assert names(calls) == "a"


def test_the_panic_threshold_makes_no_unready_pod_ready() -> None:
    calls = Calls()
    a, b = calls.ready("a"), calls.ready("b")
    calls.fleet.eject(a, "ill")
    calls.fleet.refused(a)
    calls.fleet.uneject(a, "ill")
    assert state(a) is EndpointState.EJECTED
    calls.fleet.drain("b")
    calls.fleet.eject(b, "ill")
    assert state(b) is EndpointState.DRAINING


def test_a_reason_against_a_replaced_pod_does_not_stay_with_its_successor_at_peers() -> None:
    calls, peer = Calls(), Calls()
    published: list[Mapping[str, Sequence[str]]] = []
    calls.fleet.on_ejection_change = lambda endpoint: published.append(calls.fleet.own_ejections())
    for it in (calls, peer):
        it.fleet.add(PodSettings(url="http://a", name="a", uid="1"))
    calls.fleet.eject(calls.fleet.endpoints[0], "ill")
    for it in (peer, calls):  # the peer replaces the pod before the reason arrives
        it.fleet.add(PodSettings(url="http://a", name="a", uid="2"))
    for reasons in published:
        peer.fleet.peer_ejected(1, reasons)
    assert peer.fleet.ejection_reasons(peer.fleet.endpoints[0]) == []


def test_ejection_reasons_of_a_removed_pod_are_dropped() -> None:
    calls = Calls()
    a = calls.ready("a")
    calls.fleet.remove("a")
    calls.fleet.eject(a, "ill")
    calls.fleet.uneject(a, "ill")
    assert calls.fleet.ejection_reasons(a) == ()


def test_ejection_reasons_of_siblings_count_until_they_end_or_the_sibling_stops() -> None:
    calls = Calls()
    a, *_ = (calls.ready(name) for name in "abc")
    calls.fleet.peer_ejected(1, {"a": ["ill"], "gone": ["ill"]})
    calls.fleet.peer_ejected(2, {"a": ["ill", "slow"]})
    assert (names(calls), calls.fleet.ejection_reasons(a), calls.fleet.own_ejections()) == ("bc", ["ill", "slow"], {})
    calls.fleet.peer_ejected(1, {})
    assert calls.fleet.ejection_reasons(a) == ["ill", "slow"]
    calls.fleet.peer_ejected(2, {"a": ["slow"]})
    assert calls.fleet.ejection_reasons(a) == ["slow"]
    calls.fleet.peer_ejected(2, {})
    assert names(calls) == "abc"


def test_a_local_ejection_reason_is_not_ended_by_a_sibling() -> None:
    calls = Calls()
    a, *_ = (calls.ready(name) for name in "abc")
    calls.fleet.eject(a, "ill")
    calls.fleet.peer_ejected(1, {"a": ["ill"]})
    calls.fleet.peer_ejected(1, {})
    assert (calls.fleet.ejection_reasons(a), calls.fleet.own_ejections()) == (["ill"], {"a": ["ill"]})
    calls.fleet.uneject(a, "ill")
    assert (names(calls), calls.fleet.own_ejections()) == ("abc", {})


def test_requests_sent_to_a_pod_that_refused_or_restarted_are_lost() -> None:
    calls = Calls()
    a = calls.ready("a")
    calls.clock.advance(5.0)
    assert calls.fleet.lost_at(a, 1.0) is None
    calls.fleet.refused(a)
    calls.clock.advance(2.0)
    assert calls.fleet.lost_at(a, 1.0) == 5.0
    calls.fleet.restarted(a)
    calls.fleet.reached(a)
    assert (calls.fleet.lost_at(a, 1.0), calls.fleet.lost_at(a, 7.0)) == (7.0, None)


def test_every_change_of_state_is_reported() -> None:
    seen: list[str] = []
    fleet = Fleet(ManualClock(), on_moved=lambda endpoint: seen.append(endpoint.state.value))
    a = fleet.add(pod("a"))
    fleet.reached(a)
    fleet.refused(a)
    fleet.drain("a")
    assert seen == ["ready", "ejected", "draining"]
