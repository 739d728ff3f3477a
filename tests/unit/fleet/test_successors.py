"""Pods that are replaced serve until their successors do."""

from __future__ import annotations

from proxy.core.endpoint import EndpointState
from tests.unit.fleet.test_store import Calls, pod

READY, DRAINING = EndpointState.READY, EndpointState.DRAINING
GRACE = 30.0


def of_file(calls: Calls, *names: str, role: str = "", pool: str = "default") -> None:
    calls.fleet.reconcile("file", [pod(name, role=role) for name in names], pool)


def reach(calls: Calls, name: str) -> None:
    endpoint = calls.fleet.get(name)
    assert endpoint is not None
    calls.fleet.reached(endpoint)


def ready(calls: Calls) -> list[str]:
    return [endpoint.name for endpoint in calls.fleet.ready]


def test_if_all_pods_are_replaced_the_old_ones_serve_until_a_new_one_is_ready() -> None:
    calls = Calls()
    of_file(calls, "a", "b")
    reach(calls, "a")
    reach(calls, "b")
    busy = calls.fleet.get("a")
    assert busy is not None
    busy.charge(1, 0)
    of_file(calls, "c", "d")
    assert ready(calls) == ["a", "b"]
    calls.fleet.sweep()
    assert ready(calls) == ["a", "b"]
    reach(calls, "d")
    assert ready(calls) == ["d"]
    calls.fleet.sweep()
    assert (busy.state, calls.fleet.get("b")) == (DRAINING, None)


def test_a_pod_that_leaves_serving_pods_behind_is_removed_at_once() -> None:
    calls = Calls()
    of_file(calls, "a", "b")
    reach(calls, "a")
    reach(calls, "b")
    of_file(calls, "b", "c")
    assert (ready(calls), calls.fleet.get("a")) == (["b"], None)


def test_without_a_successor_no_pod_waits() -> None:
    calls = Calls()
    of_file(calls, "a")
    reach(calls, "a")
    of_file(calls)
    assert calls.fleet.get("a") is None


def test_a_pod_that_does_not_serve_or_refuses_does_not_wait() -> None:
    calls = Calls()
    of_file(calls, "a")
    of_file(calls, "b")
    assert calls.fleet.get("a") is None
    reach(calls, "b")
    of_file(calls, "b", "c")
    refusing = calls.fleet.get("c")
    assert refusing is not None
    calls.fleet.refused(refusing)
    of_file(calls, "c")
    assert calls.fleet.get("b") is None


def test_pods_of_another_role_or_pool_are_no_successors() -> None:
    calls = Calls()
    calls.fleet.form(["default", "other"])
    for name, role, pool in (("p", "prefill", "default"), ("o", "decode", "other")):
        calls.fleet.add(pod(name, role=role), "static", pool)
        reach(calls, name)
    of_file(calls, "a", role="decode")
    reach(calls, "a")
    of_file(calls, "b", role="decode")
    assert ready(calls) == ["p", "o", "a"]
    reach(calls, "b")
    assert ready(calls) == ["p", "o", "b"]


def test_a_pod_without_a_ready_successor_is_removed_after_the_time() -> None:
    calls = Calls()
    of_file(calls, "a")
    reach(calls, "a")
    of_file(calls, "b")
    calls.clock.advance(GRACE / 2)
    of_file(calls, "b")
    calls.fleet.sweep()
    assert ready(calls) == ["a"]
    calls.clock.advance(GRACE / 2)
    calls.fleet.sweep()
    assert calls.fleet.get("a") is None


def test_a_pod_that_is_added_again_stays() -> None:
    calls = Calls()
    of_file(calls, "a")
    reach(calls, "a")
    of_file(calls, "b")
    of_file(calls, "a", "b")
    reach(calls, "b")
    calls.clock.advance(2 * GRACE)
    calls.fleet.sweep()
    assert ready(calls) == ["a", "b"]


def test_when_the_successors_are_removed_no_pod_waits() -> None:
    calls = Calls()
    of_file(calls, "a")
    reach(calls, "a")
    of_file(calls, "b")
    of_file(calls)
    assert calls.fleet.get("a") is None
    assert not calls.fleet.endpoints
