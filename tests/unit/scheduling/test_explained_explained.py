"""What is kept of a decision is the decision that was made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.attempt import Ending
from proxy.core.endpoint import EndpointState, update
from proxy.core.errors import NoEndpoints
from proxy.scheduling.explained_decision import ENTRY, EndedAttempt, short, whole
from proxy.telemetry.settings import DecisionSettings
from tests.helpers.scheduling.deciding import World, fleet
from tests.helpers.scheduling.situations import pod, ranking, scheduling

PICKERS = ("max-score-picker", "random-picker", "weighted-random-picker", "round-robin-picker")


@given(
    waiting=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    picker=st.sampled_from(PICKERS),
    requested=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_a_recorded_decision_equals_an_unrecorded_one(waiting: list[int], picker: str, requested: list[bool]) -> None:
    """With the same chances: a kept one draws no more often than another."""
    document = {"plugins": [{"type": "queue-scorer"}, {"type": picker}]}
    pods = [pod(f"pod-{at}", waiting=number) for at, number in enumerate(waiting)]
    world = World(pods, DecisionSettings(sample=0.0), document)
    plain = scheduling(document)
    for number, asks in enumerate(requested):
        request = world.request(str(number), **({"x_kvlane_explain": "1"} if asks else {}))
        made, other = world.decide(request), plain.scheduler.schedule(world.request(), pods)
        assert ranking(made) == ranking(other)
        assert (request.state.read(ENTRY) is not None) is asks


def test_the_complete_table_of_a_small_fleet() -> None:
    pods = [*fleet(), pod("away"), pod("prefill-0")]
    update(pods[3], state=EndpointState.DRAINING)
    update(pods[4], role="prefill")
    world = World(pods)
    request = world.request("r-1", x_kvlane_explain="1")
    world.clock.advance(0.25)
    decision = world.decide(request, [*pods[:3], pods[4]])
    attempt = world.respond(request, decision, 0.5)
    world.end(attempt, "r-1")
    entry = request.state.read(ENTRY)
    assert entry is not None
    table = whole(entry)
    assert table["absent"] == [{"pod": "away", "why": "draining"}]
    assert [one["pod"] for one in table["pods"]] == ["pod-0", "pod-1", "pod-2", "prefill-0"]
    assert table["pods"][2]["view"] == {"waiting": 2, "running": 0, "kvUsage": 0.2}
    (profile,) = table["profiles"]
    assert profile["filters"] == [{"name": "decode-filter", "removed": ["prefill-0"]}]
    queue, cache = profile["scorers"]
    assert (queue["name"], queue["weight"], queue["share"]) == ("queue-scorer", 3.0, 0.75)
    assert queue["scores"]["pod-1"] == {"raw": 0.5, "weighted": 0.375}
    assert cache["scores"]["pod-1"] == {"raw": 0.9, "weighted": 0.225}
    assert profile["totals"] == {"pod-0": 1.0, "pod-1": 0.6, "pod-2": 0.2}
    assert (profile["picked"], profile["runnerUp"], profile["margin"]) == ("pod-0", "pod-1", 0.4)
    assert table["decision"]["fallbacks"] == ["pod-1", "pod-2"]
    (dispatched,) = table["legs"]
    assert (dispatched["stage"], dispatched["pod"], dispatched["sent"], dispatched["firstByte"]) == (
        "whole",
        "pod-0",
        0.25,
        0.75,
    )
    assert (dispatched["status"], dispatched["ending"], dispatched["cachedTokens"]) == (200, "complete", 4)
    summary = short(entry)
    assert (summary["waited"], summary["ttft"], summary["outcome"], summary["status"]) == (0.25, 0.75, "complete", 200)
    assert (summary["pod"], summary["runnerUp"], summary["margin"], summary["candidates"]) == ("pod-0", "pod-1", 0.4, 4)


def test_a_list_emptied_by_a_filter_is_recorded_with_its_message() -> None:
    world = World([pod("p")])
    update(world.pods[0], role="prefill")
    request = world.request()
    with pytest.raises(NoEndpoints):
        world.decide(request)
    world.end(None, status=503, outcome=NoEndpoints("").reason)
    entry = request.state.read(ENTRY)
    assert entry is not None
    table = whole(entry)
    assert table["pod"] is None
    assert table["decision"] is None
    assert "decode-filter" in table["error"]["message"]
    assert table["profiles"][0]["filters"] == [{"name": "decode-filter", "removed": ["p"]}]
    assert (table["outcome"], table["status"]) == ("rejected-no-endpoints", 503)


def test_a_running_attempt_is_shown_with_its_progress() -> None:
    world = World(fleet())
    request = world.request()
    decision = world.decide(request)
    entry = request.state.read(ENTRY)
    assert entry is not None
    assert (short(entry)["outcome"], short(entry)["tries"]) == ("in-flight", 0)
    world.respond(request, decision, ending=Ending.UPSTREAM_FAILED)
    world.end(world.respond(request, decision, number=1))
    assert [dispatched["ending"] for dispatched in whole(entry)["legs"]] == ["upstream-failed", "complete"]
    summary = short(entry)
    assert (summary["tries"], summary["pod"], summary["answeredBy"]) == (2, "pod-0", "pod-1")
    assert all(isinstance(attempt, EndedAttempt) for attempt in entry.attempts)


def test_a_client_without_permission_is_served_without_the_header() -> None:
    world = World(fleet(), DecisionSettings(sample=0.0), may_ask=False)
    request = world.request(x_kvlane_explain="1")
    attempt = world.respond(request, world.decide(request))
    assert request.state.read(ENTRY) is None
    assert attempt.response_headers == []


def test_a_share_of_all_is_recorded() -> None:
    world = World(fleet(), DecisionSettings(sample=0.25))
    kept = sum(world.served(str(number)) is not None for number in range(400))
    assert 60 < kept < 140
