"""How many are kept, which, and at what price."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from proxy.core.attempt import Ending
from proxy.core.errors import BadRequest, Reason
from proxy.scheduling import explained_log
from proxy.scheduling.explained_log import DecisionQuery
from proxy.telemetry.settings import DecisionSettings
from tests.helpers.scheduling.deciding import World, fleet


def names(world: World, **query: str) -> list[str]:
    return [one["request"] for one in world.log.listed(DecisionQuery.of(query))["decisions"]]


def test_recent_decisions_are_kept_and_listed_first() -> None:
    world = World(fleet(), DecisionSettings(keep=3))
    for number in range(5):
        world.served(str(number))
    assert names(world) == ["4", "3", "2"]
    assert world.log.seen == 5


def test_slow_failed_and_requested_decisions_are_kept_apart() -> None:
    world = World(fleet(), DecisionSettings(keep=3, slow=2.0))  # type: ignore[arg-type]
    world.served("slow", after=3.0)
    world.served("asked", x_kvlane_explain="1")
    request = world.request("failed")
    attempt = world.respond(request, world.decide(request), ending=Ending.UPSTREAM_FAILED)
    world.end(attempt, "failed", 502, Reason.UPSTREAM_FAILED)
    for number in range(10):
        world.served(str(number))
    assert names(world) == ["9", "8", "7", "failed", "asked", "slow"]
    assert names(world, slow="2s") == ["slow"]
    assert names(world, asked="1") == ["asked"]
    assert names(world, outcome="upstream-failed") == ["failed"]


def test_a_dropped_decision_that_becomes_slow_returns() -> None:
    world = World(fleet(), DecisionSettings(keep=2, slow=2.0))  # type: ignore[arg-type]
    request = world.request("late")
    decision = world.decide(request)
    for number in range(5):
        world.served(str(number))
    assert "late" not in names(world)
    world.end(world.respond(request, decision, after=4.0), "late")
    assert names(world) == ["4", "3", "late"]
    world.served("another")
    assert names(world).count("late") == 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(explained_log, "MAX_BYTES", limit)
    world = World(fleet(200), DecisionSettings(keep=100_000))
    world.served("first", x_kvlane_explain="1")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(400):
            world.served(str(number), x_kvlane_explain="1")
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 5 < len(world.log) < 300
    assert world.log.bytes <= limit
    assert taken <= limit * 1.1


def test_long_ids_of_requests_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(explained_log, "MAX_BYTES", limit)
    world = World(fleet(), DecisionSettings(keep=100_000))
    for number in range(100):
        world.served(f"{number}" + "x" * 60_000)
    assert 0 < len(world.log) * 60_000 <= limit


def test_a_decision_is_found_by_its_id_and_by_its_request() -> None:
    world = World(fleet())
    for name in ("a", "b", "a"):
        world.served(name)
    first, newest = world.log.find("1"), world.log.find("a")
    assert first is not None
    assert newest is not None
    assert (first.request, first.id, newest.id) == ("a", "1", "3")
    assert world.log.find("c") is None


def test_decisions_are_filtered_by_pod_tenant_and_request() -> None:
    world = World(fleet())
    world.served("a")
    request = world.request("b")
    decision = world.decide(request)
    world.respond(request, decision, ending=Ending.UPSTREAM_FAILED)
    world.end(world.respond(request, decision, number=1), "b")
    assert names(world, pod="pod-0") == ["b", "a"]
    assert names(world, pod="pod-1") == ["b"]
    assert names(world, tenant="x") == []
    assert names(world, request="a") == ["a"]
    assert names(world, limit="1") == ["b"]


@pytest.mark.parametrize("query", [{"slwo": "1"}, {"slow": "fast"}, {"limit": "0"}, {"limit": "many"}])
def test_an_invalid_filter_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        DecisionQuery.of(query)


def test_a_request_refused_after_the_decision_has_ended() -> None:
    world = World(fleet())
    request = world.request("r")
    world.decide(request)
    world.end(None, "r", 503, Reason.NO_ENDPOINTS)
    assert names(world, outcome="in-flight") == []
    assert names(world, outcome="rejected-no-endpoints") == ["r"]
