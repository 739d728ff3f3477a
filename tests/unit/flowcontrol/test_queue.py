"""The order in which requests leave the queue, and which are evicted for others."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.ports import IDENTITY, Identity
from proxy.core.request import CycleState, InferenceRequest, Prompt
from proxy.flowcontrol.queue import MOST_UNKNOWN_TENANTS, SHARED_FLOWS, Queue, QueueEntry
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings, LeastService


class Line:
    """A queue and the requests in it."""

    def __init__(self, **settings: Any) -> None:
        self.queue = Queue(FlowControlSettings(**settings))
        self.now = 0.0

    def come(self, tenant: str = "", tokens: int = 1, **fields: Any) -> QueueEntry:
        self.now += 1.0
        prompt = Prompt((b"x" * 4 * tokens,))
        request = InferenceRequest("r", "/", fields.pop("model", "m"), prompt, b"12345678", tenant=tenant, **fields)
        entry = QueueEntry(request, self.queue.band(request.priority), self.now, lambda refusal: None)
        entry.band.push(entry)
        return entry

    def next(self) -> QueueEntry | None:
        for band in self.queue.bands:
            if (entry := band.due(())) is not None:
                band.dequeue(entry)
                return entry
        return None

    def served(self, count: int) -> Counter[str]:
        return Counter(entry.request.tenant for _ in range(count) if (entry := self.next()) is not None)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 50),
        st.integers(-2, 2),
        st.floats(0, 1e6),
        st.sampled_from(("m", "n")),
    ),
    max_size=40,
)
POLICIES = {
    "fairness": st.sampled_from(("strict", "round-robin", "deficit-round-robin", "least-service")),
    "ordering": st.sampled_from(("fcfs", "edf", "slo-deadline")),
}


@given(REQUESTS, st.data(), st.fixed_dictionaries(POLICIES))
def test_each_request_leaves_once_and_higher_priorities_first(requests: Any, data: Any, policies: Any) -> None:
    line = Line(**policies)
    here = [
        line.come(tenant, tokens, priority=priority, deadline=deadline, model=model)
        for tenant, tokens, priority, deadline, model in requests
    ]
    gone = data.draw(st.sets(st.sampled_from(here))) if here else set()
    for entry in gone:
        entry.band.drop(entry)
        entry.band.drop(entry)
    assert line.queue.length == len(here) - len(gone)
    assert line.queue.bytes == 8 * line.queue.length
    order = []
    while (entry := line.next()) is not None:
        order.append(entry)
    assert set(order) == set(here) - gone
    assert len(order) == len(set(order))
    priorities = [entry.request.priority for entry in order]
    assert priorities == sorted(priorities, reverse=True)
    assert line.queue.length == line.queue.bytes == 0
    assert not any(band.models for band in line.queue.bands)
    for flow in {(one.request.tenant, one.request.priority) for one in order}:
        keys = [one.key for one in order if (one.request.tenant, one.request.priority) == flow]
        assert keys == sorted(keys), "within a flow its ordering holds"


@given(st.lists(st.integers(1, 100), min_size=60, max_size=60), st.lists(st.integers(1, 100), min_size=60, max_size=60))
def test_while_two_tenants_wait_neither_has_more_than_one_large_prompt_beyond_its_share(
    many: list[int], few: list[int]
) -> None:
    line = Line(fairness="deficit-round-robin")
    for tokens in many:
        line.come("many", tokens)
    for tokens in few:
        line.come("few", tokens)
    had = Counter[str]()
    while all(flow.entries for flow in line.queue.bands[0]._flows.values()):
        entry = line.next()
        assert entry is not None
        had[entry.request.tenant] += entry.cost
        assert abs(had["many"] - had["few"]) <= 100


def test_shares_are_kept_in_requests_and_in_tokens() -> None:
    for fairness in ("round-robin", "deficit-round-robin"):
        line = Line(fairness=fairness, shares={"gold": 3.0})
        for _ in range(40):
            line.come("gold", 10)
            line.come("plain", 10)
        assert line.served(40) == {"gold": 30, "plain": 10}


def test_service_without_competition_is_not_held_against_a_tenant() -> None:
    line = Line()
    for _ in range(100):
        line.come("old")
    line.served(90)
    for _ in range(10):
        line.come("new")
    assert line.served(10) == {"old": 5, "new": 5}


def test_a_returning_tenant_has_saved_up_nothing() -> None:
    line = Line()
    line.come("back")
    for _ in range(50):
        line.come("busy")
    line.served(40)
    for _ in range(10):
        line.come("back")
    served = line.served(10)
    assert abs(served["back"] - served["busy"]) <= 2


def test_an_unlisted_priority_has_a_band_like_the_next_lower_one() -> None:
    bands = (BandSettings(10, "urgent", max_queued=7), BandSettings(0, ceiling=0.5))
    queue = Line(bands=bands).queue
    assert [(band.priority, band.name) for band in queue.bands] == [(10, "urgent"), (0, "0")]
    unlisted = {priority: queue.band(priority) for priority in (99, 5, -5)}
    assert [band.priority for band in queue.bands] == [99, 10, 5, 0, -5]
    assert [unlisted[priority].ceiling for priority in (99, 5, -5)] == [1.0, 0.5, 0.5]
    assert unlisted[99].name == "99"
    assert queue.band(99) is unlisted[99]


def test_eviction_takes_the_last_of_the_lowest_band_and_of_its_largest_tenant() -> None:
    line = Line(max_queued=100)
    low = [line.come("any", priority=-1) for _ in range(3)]
    many = [line.come("many") for _ in range(20)]
    newcomer = QueueEntry(InferenceRequest("r", "/", "m", tenant="few"), line.queue.band(0), 99.0, lambda refusal: None)
    assert line.queue.victim_for(newcomer) is low[-1]
    for entry in low:
        entry.band.drop(entry)
    assert line.queue.victim_for(newcomer) is many[-1]
    again = QueueEntry(InferenceRequest("r", "/", "m", tenant="many"), line.queue.band(0), 99.0, lambda refusal: None)
    assert line.queue.victim_for(again) is None
    below = QueueEntry(InferenceRequest("r", "/", "m", tenant="few"), line.queue.band(-1), 99.0, lambda refusal: None)
    assert line.queue.victim_for(below) is None, "no request leaves for a less urgent one"


def test_the_position_counts_turns() -> None:
    line = Line()
    for _ in range(50):
        line.come("many")
    few = QueueEntry(InferenceRequest("r", "/", "m", tenant="few"), line.queue.band(0), 99.0, lambda refusal: None)
    many = QueueEntry(InferenceRequest("r", "/", "m", tenant="many"), line.queue.band(0), 99.0, lambda refusal: None)
    assert (line.queue.ahead(few), line.queue.ahead(many)) == (1, 50)
    strict = Line(fairness="strict", ordering="edf")
    for deadline in (10.0, 30.0, 50.0):
        strict.come("many", deadline=deadline)
    request = InferenceRequest("r", "/", "m", tenant="few", deadline=40.0)
    assert strict.queue.ahead(QueueEntry(request, strict.queue.band(0), 4.0, lambda refusal: None)) == 2


def test_later_deadlines_of_its_own_tenant_are_not_ahead_of_a_request() -> None:
    line = Line(fairness="round-robin", ordering="edf")
    line.come("a", deadline=90.0)
    line.come("b", deadline=90.0)
    request = InferenceRequest("r", "/", "m", Prompt((b"",)), b"", tenant="a", deadline=50.0)
    assert line.queue.ahead(QueueEntry(request, line.queue.band(0), 4.0, lambda refusal: None)) == 1


def test_requests_that_left_from_the_middle_are_not_held() -> None:
    line = Line()
    first = line.come()
    for _ in range(1000):
        entry = line.come()
        entry.band.drop(entry)
    assert first.flow is not None
    assert len(first.flow.ordered) == 1


def test_tenants_that_do_not_come_back_are_forgotten() -> None:
    line = Line()
    for number in range(3000):
        line.come(f"tenant-{number}")
        line.next()
    assert len(line.queue.bands[0]._flows) <= 1001


def test_least_service_prefers_the_least_recent_service_in_any_band() -> None:
    line = Line(fairness="least-service")
    line.queue.attained.add("a", 1000, now=0.0)
    line.queue.attained.add("b", 400, now=60.0)
    for tenant in "aabbcc":
        line.come(tenant)
    order = [entry.request.tenant for _ in range(6) if (entry := line.next()) is not None]
    assert order == list("ccbbaa"), "a has 500 left of its 1000"


@pytest.mark.parametrize(
    ("service", "order"), [(LeastService(), "cba"), (LeastService(weight=0.4, wait_weight=0.6), "abc")], ids=str
)
def test_waiting_time_counts_with_its_weight(service: LeastService, order: str) -> None:
    line = Line(fairness="least-service", least_service=service)
    for tenant, had in (("a", 1000), ("b", 900), ("c", 0)):
        line.queue.attained.add(tenant, had, now=0.0)
        line.come(tenant)
    assert "".join(one.request.tenant for _ in range(3) if (one := line.next()) is not None) == order


def test_shares_scale_service() -> None:
    line = Line(fairness="least-service", shares={"a": 3})
    line.queue.attained.add("a", 600, now=0.0)
    line.queue.attained.add("b", 300, now=0.0)
    line.come("b")
    line.come("a")
    assert (first := line.next()) is not None
    assert first.request.tenant == "a"


def _steps(line: Line) -> int:
    """Function calls of one more arrival, a turn and a departure from the middle, including calls of C."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    entries = [line.come(f"new-{number}") for number in range(3)]
    sys.setprofile(count)
    try:
        line.queue.ahead(entries[0])
        line.queue.victim_for(entries[0])
        line.come("another")
        line.next()
        entries[1].band.drop(entries[1])
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "policies",
    [{"fairness": "round-robin"}, {"fairness": "strict", "ordering": "edf"}, {"fairness": "deficit-round-robin"}],
    ids=str,
)
def test_the_cost_of_an_arrival_and_a_departure_is_independent_of_the_number_of_tenants(policies: Any) -> None:
    few, many = Line(**policies), Line(**policies)
    for line, tenants in ((few, 20), (many, 4000)):
        for number in range(tenants):
            known(line, f"tenant-{number}")
    assert len(many.queue.bands[0]._active) == 4000
    assert _steps(many) < 1.5 * _steps(few)


def known(line: Line, tenant: str) -> QueueEntry:
    """A request with a key."""
    state = CycleState()
    state.write(IDENTITY, Identity(tenant, tenant))
    return line.come(tenant, state=state)


def test_tenants_that_clients_invent_share_a_bounded_number_of_flows_and_lose_no_request() -> None:
    line = Line(shares={"gold": 2.0})
    here = [line.come(f"invented-{number}") for number in range(3000)]
    flows = {entry.flow for entry in here}
    assert len(flows) == MOST_UNKNOWN_TENANTS + SHARED_FLOWS
    assert len(line.queue.bands[0]._flows) == len(flows)
    gold, keyed = line.come("gold"), known(line, "keyed")
    assert gold.flow not in flows, "the configuration names it"
    assert keyed.flow not in flows, "its key names it"
    order = []
    while (entry := line.next()) is not None:
        order.append(entry)
    assert set(order) == {*here, gold, keyed}
    assert order.index(keyed) < MOST_UNKNOWN_TENANTS + SHARED_FLOWS + 2, "it waits one turn of the others, no longer"
    late = line.come("invented-2999")
    assert late.flow not in flows, "tenants have flows of their own again when few wait"
