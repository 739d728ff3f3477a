"""Sleeping pods get no requests, whatever else is wrong with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.ports import ManualClock
from proxy.fleet.dialects import DIALECTS
from proxy.fleet.mirror import MessageKind, Mirror, MirroredFleet
from proxy.fleet.scrape import parse
from tests.unit.fleet.test_store import Calls, state


def sleep(calls: Calls, endpoint: Endpoint, level: int = 1) -> None:
    endpoint.publish(replace(endpoint.metrics, sleep_level=level), 0)
    calls.fleet.refreshed(endpoint)


def test_a_sleeping_pod_is_no_candidate_until_it_wakes_up_without_its_caches() -> None:
    calls = Calls()
    one, other = calls.ready("a", "m"), calls.ready("b", "m")
    sleep(calls, one)
    assert list(calls.fleet.endpoints_for("m")) == [other]
    assert state(one) is EndpointState.EJECTED
    assert calls.fleet.ejection_reasons(one) == ["asleep"]
    assert calls.fleet.knows("m")
    calls.events.clear()
    sleep(calls, one, 0)
    assert list(calls.fleet.endpoints_for("m")) == [one, other]
    assert calls.events == [("restarted", "a")]
    assert calls.fleet.ejection_reasons(one) == []


def test_a_pod_that_slept_before_its_first_scrape_is_no_candidate() -> None:
    calls = Calls()
    endpoint = calls.ready("a", "m")
    calls.fleet.refused(endpoint)
    sleep(calls, endpoint, 2)
    calls.fleet.reached(endpoint)
    assert calls.fleet.endpoints_for("m") == ()


def test_the_panic_threshold_wakes_no_pod() -> None:
    calls = Calls()
    one, other = calls.ready("a", "m"), calls.ready("b", "m")
    sleep(calls, one)
    calls.fleet.eject(one, "breaker")
    calls.fleet.eject(other, "breaker")
    assert calls.fleet.panics
    assert list(calls.fleet.endpoints_for("m")) == [other]


def test_a_sleeping_draining_pod_drains() -> None:
    calls = Calls()
    endpoint = calls.ready("a", "m")
    sleep(calls, endpoint)
    calls.fleet.drain("a")
    assert state(endpoint) is EndpointState.DRAINING
    sleep(calls, endpoint, 0)
    assert state(endpoint) is EndpointState.DRAINING


def test_models_of_sleeping_pods_are_listed_with_wake() -> None:
    calls = Calls()
    endpoint = calls.ready("a", "m")
    sleep(calls, endpoint)
    assert (calls.fleet.models(), calls.fleet.serves) == ([], False)
    calls.fleet.wakes = True
    assert ([card["id"] for card in calls.fleet.models()], calls.fleet.serves) == (["m"], True)
    sleep(calls, endpoint, 2)
    assert (calls.fleet.models(), calls.fleet.serves) == ([], False)
    sleep(calls, endpoint, 1)
    calls.fleet.drain("a")
    assert (calls.fleet.models(), calls.fleet.serves) == ([], False)


def test_mirrors_know_sleeping_pods() -> None:
    clock = ManualClock()
    mirror = Mirror(clock)
    calls = Calls()
    calls.fleet = MirroredFleet(clock, lambda kind, record: mirror.apply(kind, record))
    endpoint = calls.ready("a", "m")
    mirror.apply(MessageKind.ROLL, b'["a"]')
    assert [pod.name for pod in mirror.endpoints_for("m")] == ["a"]
    sleep(calls, endpoint)
    assert mirror.endpoints_for("m") == ()
    sleep(calls, endpoint, 0)
    assert [pod.name for pod in mirror.endpoints_for("m")] == ["a"]


AWAKE = 'vllm:engine_sleep_state{engine="%d",sleep_state="awake"} %d\n'
DISCARDED = 'vllm:engine_sleep_state{engine="%d",sleep_state="discard_all"} %d\n'


@pytest.mark.parametrize(
    ("lines", "level"),
    [
        ("", 0),
        (AWAKE % (0, 1) + DISCARDED % (0, 0), 0),
        (AWAKE % (0, 0) + DISCARDED % (0, 0), 1),
        (AWAKE % (0, 0) + DISCARDED % (0, 1), 2),
        (AWAKE % (0, 1) + AWAKE % (1, 0), 1),
    ],
)
def test_the_engine_reports_that_it_sleeps(lines: str, level: int) -> None:
    text = "vllm:num_requests_waiting 0\n" + lines
    assert parse(text.encode(), DIALECTS["vllm"]).sleep_level == level
