"""Pods of several pools in one fleet."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import pytest

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.ports import SystemClock
from proxy.fleet.dialects import Dialects
from proxy.fleet.records import SlowStart
from proxy.fleet.runner import FleetRunner
from proxy.fleet.settings import PodSettings, PodSources
from proxy.fleet.store import Fleet, FleetSettings, PoolPods, pods_of
from proxy.http.upstream.pool import PooledFetcher
from tests.helpers.fleet.pods import FakePod
from tests.unit.fleet.test_mirror import Pair
from tests.unit.fleet.test_store import Calls, cards, pod
from tests.wire.fleet.test_runner import FAST


def ready(fleet: Fleet, name: str, pool: str, *models: str) -> Endpoint:
    endpoint = fleet.add(pod(name), pool=pool)
    fleet.listed(endpoint, cards(*models))
    fleet.reached(endpoint)
    return endpoint


def test_a_pool_has_its_own_pods_and_the_fleet_has_all() -> None:
    fleet = Calls().fleet
    a, b, c = ready(fleet, "a", "default", "m"), ready(fleet, "b", "large", "m"), ready(fleet, "c", "large", "n")
    large = PoolPods(fleet, "large")
    assert list(fleet.endpoints_for("m")) == [a, b]
    assert (list(large.endpoints_for("m")), list(large.ready)) == ([b], [b, c])
    assert list(PoolPods(fleet, "huge").endpoints_for("m")) == []
    fleet.drain("b")
    assert (list(large.endpoints_for("m")), list(large.ready)) == ([], [c])
    assert pods_of(fleet, "default", 1) is fleet


def test_a_watcher_of_a_pool_gets_only_its_pods() -> None:
    fleet, received = Calls().fleet, list[str]()
    ready(fleet, "a", "default")
    ready(fleet, "b", "large")
    stop = PoolPods(fleet, "large").watch(
        lambda endpoint: received.append(f"+{endpoint.name}"), lambda endpoint: received.append(f"-{endpoint.name}")
    )
    for name in "ab":
        fleet.remove(name)
    ready(fleet, "c", "large")
    stop()
    ready(fleet, "d", "large")
    assert received == ["+b", "-b", "+c"]


def test_a_pod_that_moves_to_another_pool_is_a_new_endpoint() -> None:
    calls = Calls()
    before = ready(calls.fleet, "a", "default", "m")
    before.charge(1, 0)
    after = calls.fleet.add(pod("a"), pool="large")
    assert (after is before, after.pool, after.load.requests, after.state) == (
        False,
        "large",
        0,
        EndpointState.STARTING,
    )
    assert calls.events == [("ready", "a"), ("removed", "a")]
    assert calls.fleet.endpoints == [after]


def test_the_pods_of_a_removed_pool_are_removed_from_any_source() -> None:
    fleet = Calls().fleet
    fleet.form(("default", "large"))
    a = ready(fleet, "a", "default")
    fleet.reconcile("static of large", [pod("b")], "large")
    busy = ready(fleet, "c", "large")
    busy.charge(1, 0)
    fleet.form(("default",))
    fleet.sweep()
    assert (fleet.endpoints, fleet.pools) == ([a, busy], ("default",))
    assert busy.state is EndpointState.DRAINING


def test_a_configured_pod_leaves_its_old_pool_before_it_joins_another(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Calls().fleet
    fleet.form(("default", "large"))
    fleet.reconcile("static of large", [pod("a"), pod("b")], "large")
    fleet.settings = FleetSettings(("default", "large"), {"static": {"a"}, "static of large": {"c"}})
    fleet.reconcile("static", [pod("a")])
    fleet.reconcile("static of large", [pod("c")], "large")
    assert {endpoint.name: endpoint.pool for endpoint in fleet.endpoints} == {"a": "default", "c": "large"}
    assert "did not add" not in caplog.text


def test_ejections_in_one_pool_do_not_count_for_another() -> None:
    fleet = Calls().fleet
    here = [ready(fleet, name, "default") for name in "abcdef"]
    there = [ready(fleet, name, "large") for name in "xy"]
    for endpoint in (*here[:2], *there):
        fleet.eject(endpoint, "ill")
    assert list(PoolPods(fleet, "large").ready) == there
    assert list(PoolPods(fleet, "default").ready) == here[2:]
    assert fleet.panics
    fleet.uneject(there[0], "ill")
    assert (list(PoolPods(fleet, "large").ready), fleet.panics) == ([there[0]], False)


def test_a_returning_pod_has_a_slow_start_in_its_pool() -> None:
    calls = Calls()
    fleet = Fleet(calls.clock, slow_start=SlowStart(10.0, calls.clock, random.Random(1)))
    _, back = ready(fleet, "a", "large"), ready(fleet, "b", "large")
    fleet.refused(back)
    fleet.reached(back)
    large = PoolPods(fleet, "large")
    drawn = [len(large.endpoints_for("")) for _ in range(200)]
    assert 0 < drawn.count(2) < 60
    calls.clock.advance(10.0)
    assert len(large.endpoints_for("")) == 2


def test_a_mirror_has_pods_in_the_pools_of_the_origin() -> None:
    pair = Pair()
    pair.origin.reached(pair.origin.add(pod("a"), pool="large"))
    pair.tell()
    before = pair.seen("a")
    assert before.pool == "large"
    pair.origin.reached(pair.origin.add(pod("a"), pool="huge"))
    pair.tell()
    after = pair.seen("a")
    assert (after is before, after.pool, after.state) == (False, "huge", EndpointState.READY)
    pair.origin.remove("a")
    pair.tell_all()
    assert list(pair.mirror.endpoints) == []


async def test_each_pool_is_scraped_by_its_own_runner() -> None:
    fleet, clock = Fleet(SystemClock()), SystemClock()
    async with FakePod() as one, FakePod() as two, AsyncExitStack() as stack:
        fetcher = await stack.enter_async_context(PooledFetcher(1.0, clock))
        here, there = (
            PodSources((PodSettings(made.url, name),), refresh=FAST) for made, name in ((one, "a"), (two, "b"))
        )
        first = await stack.enter_async_context(FleetRunner(fleet, here, fetcher, clock, random.Random(1)))
        second = FleetRunner(fleet, there, fetcher, clock, random.Random(1), pool="large")
        async with second:
            assert await first.first_contact(5)
            assert await second.first_contact(5)
            assert {endpoint.name: endpoint.pool for endpoint in fleet.ready} == {"a": "default", "b": "large"}
            without_pods = PodSources(refresh=FAST)
            first.settings = without_pods, Dialects()
            assert [endpoint.name for endpoint in fleet.endpoints] == ["b"]
            second.settings = without_pods, Dialects()
            assert fleet.endpoints == []
