"""Which pod is tried after a failure, when, and when none is."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.errors import (
    AllFailed,
    BadGateway,
    ConnectRefused,
    Declined,
    LastSaturated,
    RankOutOfRange,
    RequestError,
    StreamInterrupted,
    SuspectedPoison,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import IDENTITY, Identity, ManualClock
from proxy.core.request import InferenceRequest, Naming, Prompt
from proxy.core.tasks import Tasks
from proxy.models.resolver import with_fresh_state
from proxy.reliability.failover import MOST, Failover, Quarantine, RetryBudget, RetryState
from proxy.reliability.settings import Backoff, Retries

REFUSED = ConnectRefused("nobody listens")
GARBLED = UpstreamFailed("nonsense")


class BrokeOff(UpstreamFailed):
    may_have_crashed = True


BROKE_OFF = BrokeOff("closed")


class World:
    """Pods `a`, `b`, … in rank order. `dead` ones accept no connection."""

    def __init__(self, names: str = "abc", percent: float = 20.0, **retries: Any) -> None:
        self.clock = ManualClock(now=1000.0)
        self.pods = [Endpoint(name, state=EndpointState.READY) for name in names]
        self.dead = ""
        self.slept: list[float] = []
        self.started = 0
        self.budget = RetryBudget(percent, self.clock, lambda: self.started)
        self.failover = Failover(
            Retries(**retries),
            self.clock,
            random.Random(1),
            self.budget,
            Quarantine(self.clock, self._alive, Tasks()),
            self._sleep,
            others=self._others,
        )
        self.newcomers: list[Endpoint] = []

    def first(self, text: bytes = b"hello", deadline: float = float("inf"), model: str = "m") -> Attempt:
        request = InferenceRequest("r", "/", model, Prompt((text,)), deadline=deadline)
        target, *others = self.pods
        return Attempt(request, Decision(target, tuple(others), "default"), target, 0, self.clock.now())

    async def pods_tried(self, *errors: UpstreamFailed, attempt: Attempt | None = None) -> str:
        """The pods that are asked if each fails with the error in its place, and what comes of it at last."""
        dispatched = attempt or self.first()
        names = dispatched.endpoint.name
        try:
            for error in errors:
                dispatched = await self.failover.next_attempt(dispatched, error)
                names += dispatched.endpoint.name
        except RequestError as error:
            return f"{names} {type(error).__name__}"
        return names

    def _others(self, attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [pod for pod in self.newcomers if pod not in tried]

    async def _alive(self, endpoint: Endpoint) -> bool:
        return endpoint.name not in self.dead

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)


def _with_fallback(attempt: Attempt) -> Attempt:
    request = InferenceRequest("r", "/", "m", naming=Naming("m", ("n",)))
    return Attempt(request, attempt.decision, attempt.endpoint, 0, attempt.started_at)


async def test_the_next_in_rank_is_tried_and_no_pod_twice_while_others_are_left() -> None:
    assert await World("abcd", attempts=9).pods_tried(*[GARBLED] * 5) == "abcdab"


async def test_failed_attempts_are_logged_with_their_error_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    world = World("abcd", attempts=9)
    await world.pods_tried(GARBLED, GARBLED, Declined(503))
    world.clock.advance(61.0)
    await world.pods_tried(GARBLED)
    assert [record.getMessage() for record in caplog.records] == [
        f"request r: attempt 1 failed on pod a: {GARBLED}",
        f"request r: attempt 3 failed on pod c: {Declined(503)}",
        f"request r: attempt 1 failed on pod a: {GARBLED}",
    ]


async def test_new_pods_are_tried_before_a_second_try() -> None:
    world = World("ab", attempts=9)
    world.newcomers = [Endpoint("x", state=EndpointState.READY)]
    assert await world.pods_tried(*[GARBLED] * 4) == "abxab"


async def test_a_refusal_is_not_passed_on_while_a_new_pod_is_left() -> None:
    world = World("a")
    attempt = world.first()
    assert not world.failover.retries_instead(attempt, 503)
    world.newcomers = [Endpoint("x", state=EndpointState.READY)]
    assert world.failover.retries_instead(attempt, 503)


async def test_only_the_pod_with_the_stored_response_is_tried() -> None:
    world = World("a")
    world.newcomers = [Endpoint("x", state=EndpointState.READY)]
    attempt = world.first()
    attempt.decision = Decision(attempt.endpoint)
    assert not world.failover.retries_instead(attempt, 503)
    assert await world.pods_tried(GARBLED, attempt=attempt) == "aa"


async def test_attempts_count_pods_that_got_the_request() -> None:
    assert await World("abcd").pods_tried(GARBLED, GARBLED, GARBLED) == "abc AllFailed"
    assert await World("abcd").pods_tried(REFUSED, REFUSED, GARBLED, GARBLED, GARBLED) == "abcda AllFailed"


async def test_a_single_pod_is_tried_again_after_a_while() -> None:
    world = World("a")
    assert await world.pods_tried(REFUSED, REFUSED, REFUSED) == "aaa AllFailed"
    assert len(world.slept) == 2


async def test_unreachable_pods_cost_no_delay() -> None:
    world = World("abcdefgh")
    assert await world.pods_tried(*[REFUSED] * 7) == "abcdefgh"
    assert world.slept == []


async def test_retries_are_delayed_increasingly_and_with_jitter() -> None:
    world = World("abcdefgh", attempts=8, backoff=Backoff(0.1, 1.0))  # type: ignore[arg-type]
    await world.pods_tried(*[GARBLED] * 7)
    for slept, longest in zip(world.slept, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0], strict=True):
        assert longest / 2 <= slept <= longest
    assert len(set(world.slept)) == 7


@pytest.mark.parametrize("state", [EndpointState.DRAINING, EndpointState.EJECTED])
async def test_pods_that_are_no_longer_ready_are_skipped(state: EndpointState) -> None:
    world = World()
    update(world.pods[1], state=state)
    assert await world.pods_tried(GARBLED) == "ac"
    update(world.pods[0], state=state)
    update(world.pods[2], state=state)
    assert await world.pods_tried(GARBLED) == "a AllFailed"


async def test_a_silent_pod_is_followed_by_another_within_the_deadline() -> None:
    late = UpstreamTimedOut("no byte")
    assert await World().pods_tried(late) == "ab"
    assert await World().pods_tried(late, late, late) == "abc GatewayTimeout"
    world = World()
    assert await world.pods_tried(late, attempt=world.first(deadline=1000.0)) == "a GatewayTimeout"


async def test_silence_counts_as_504() -> None:
    assert await World(on=("connect", "reset")).pods_tried(UpstreamTimedOut("no byte")) == "a GatewayTimeout"


async def test_no_pod_is_tried_after_the_clients_deadline() -> None:
    world = World(backoff=Backoff(1.0, 1.0))  # type: ignore[arg-type]
    assert await world.pods_tried(GARBLED, attempt=world.first(deadline=1000.3)) == "a GatewayTimeout"
    assert world.slept == []
    assert await world.pods_tried(REFUSED, attempt=world.first(deadline=1000.3)) == "ab"


async def test_a_retry_that_is_not_sent_takes_nothing_of_the_budget() -> None:
    world = World(backoff=Backoff(1.0, 1.0))  # type: ignore[arg-type]
    world.budget._left = 1.0
    assert await world.pods_tried(GARBLED, attempt=world.first(deadline=1000.3)) == "a GatewayTimeout"
    for pod in world.pods[1:]:
        update(pod, state=EndpointState.EJECTED)
    update(world.pods[0], state=EndpointState.EJECTED)
    assert await world.pods_tried(GARBLED) == "a AllFailed"
    assert world.budget.spend()


async def test_a_rank_out_of_range_is_followed_at_once_and_counts_for_no_attempt() -> None:
    world = World("abcd", percent=0.0, attempts=1, on=())
    refused = RankOutOfRange(3, 2, "data_parallel_rank 3 is out of range [0, 2).")
    assert await world.pods_tried(refused, refused, refused) == "abcd"
    assert world.slept == []
    assert await world.pods_tried(refused, refused, refused, refused) == "abcd AllFailed"


async def test_unlisted_statuses_are_not_retried() -> None:
    world = World(on=("connect",))
    assert await world.pods_tried(GARBLED) == "a AllFailed"
    assert await world.pods_tried(REFUSED) == "ab"
    assert await World(on=("reset",)).pods_tried(REFUSED) == "a AllFailed"


@pytest.mark.parametrize(("status", "taken"), [(500, True), (503, True), (429, True), (501, False), (404, False)])
def test_responses_with_listed_statuses_are_not_passed_on(status: int, taken: bool) -> None:
    world = World()
    assert world.failover.retries_instead(world.first(), status) is taken


def test_a_404_is_passed_on_unless_another_ready_pod_lists_the_model() -> None:
    world = World("abc")
    assert not world.failover.retries_instead(world.first(), 404)
    update(world.pods[2], models=frozenset({"m"}))
    assert world.failover.retries_instead(world.first(), 404)
    assert not World("abc", attempts=1).failover.retries_instead(world.first(), 404)
    stored = Attempt(world.first().request, Decision(world.pods[0]), world.pods[0], 0, world.clock.now())
    assert not world.failover.retries_instead(stored, 404)
    update(world.pods[2], state=EndpointState.EJECTED)
    assert not world.failover.retries_instead(world.first(), 404)


async def test_only_a_pod_that_lists_the_model_is_tried_after_a_404() -> None:
    world = World("abc")
    update(world.pods[2], models=frozenset({"m"}))
    assert await world.pods_tried(Declined(404), Declined(404)) == "ac UnknownModel"


def test_a_404_that_may_list_models_is_not_passed_on_to_a_restricted_key() -> None:
    for models, taken in ((None, False), (frozenset({"m"}), True)):
        world = World()
        first = world.first()
        first.request.state.write(IDENTITY, Identity("a", models=models))
        assert world.failover.retries_instead(first, 404) is taken


def test_the_last_possible_response_is_passed_on() -> None:
    assert not World("a").failover.retries_instead(World("a").first(), 503)
    assert not World(attempts=1).failover.retries_instead(World().first(), 503)
    world = World("ab")
    update(world.pods[1], state=EndpointState.DRAINING)
    assert not world.failover.retries_instead(world.first(), 503)
    assert not World(on=("connect", "502")).failover.retries_instead(World().first(), 503)


async def test_a_pods_429_that_was_withheld_for_a_fallback_model_stays_429() -> None:
    world = World("a")
    first = world.first()
    with pytest.raises(LastSaturated) as caught:
        await world.failover.next_attempt(_with_fallback(first), Declined(429, 7.0))
    assert (caught.value.status, caught.value.retry_after) == (429, 7.0)


async def test_a_503_that_is_no_cause_of_retries_goes_to_the_fallback_model_at_once() -> None:
    world = World("ab", on=("connect",))
    first = _with_fallback(world.first())
    assert world.failover.retries_instead(first, 503)
    assert await world.pods_tried(Declined(503), attempt=first) == "a AllFailed"


async def test_a_rank_that_the_pod_lacks_is_retried_elsewhere_also_with_a_fallback_model() -> None:
    world = World("ab")
    assert await world.pods_tried(RankOutOfRange(3, 2, "no"), attempt=_with_fallback(world.first())) == "ab"


async def test_a_response_is_withheld_only_with_a_retry_that_no_other_request_takes() -> None:
    world = World("ab", percent=0.0)
    for _ in range(int(MOST) - 1):
        assert world.budget.spend()
    first, second = world.first(), world.first()
    assert world.failover.retries_instead(first, 503)
    assert not world.failover.retries_instead(second, 503)
    assert await world.pods_tried(Declined(503), attempt=first) == "ab"


async def test_a_response_is_passed_on_if_the_deadline_may_end_before_the_retry() -> None:
    world = World(backoff=Backoff(1.0, 1.0))  # type: ignore[arg-type]
    assert not world.failover.retries_instead(world.first(deadline=1000.9), 503)
    assert world.failover.retries_instead(world.first(deadline=1001.1), 503)


async def test_every_other_pod_is_tried_once_after_a_saturated_one() -> None:
    world = World("abc", attempts=9)
    second = await world.failover.next_attempt(world.first(), Declined(429, 2.0))
    assert second.endpoint.name == "b"
    assert world.failover.retries_instead(second, 429)
    third = await world.failover.next_attempt(second, Declined(429, 2.0))
    assert third.endpoint.name == "c"
    assert not world.failover.retries_instead(third, 429)


async def test_retries_are_limited_to_a_share_of_the_traffic_and_a_minimum() -> None:
    world = World("ab", percent=50.0)
    for _ in range(int(MOST)):
        assert await world.pods_tried(GARBLED) == "ab"
        world.clock.advance(-sum(world.slept))
        world.slept.clear()
    assert not world.failover.retries_instead(world.first(), 503)
    assert await world.pods_tried(GARBLED) == "a AllFailed"
    world.started = 4
    assert [await world.pods_tried(GARBLED) for _ in range(3)] == ["ab", "ab", "a AllFailed"]
    world.clock.advance(1.0)
    assert await world.pods_tried(GARBLED) == "ab"
    assert await world.pods_tried(REFUSED) == "ab", "a request that reached no pod is not counted against it"


async def test_a_request_that_crashed_two_pods_is_refused_for_a_minute() -> None:
    world = World("abcd")
    world.dead = "ab"
    assert await world.pods_tried(BROKE_OFF, BROKE_OFF) == "ab SuspectedPoison"
    poison = world.failover.quarantine
    with pytest.raises(SuspectedPoison):
        poison.check(world.first().request)
    poison.check(world.first(b"another").request)
    poison.check(world.first(model="another").request)
    world.clock.advance(61.0)
    poison.check(world.first().request)
    assert not poison.entries


@pytest.mark.parametrize("dead", ["", "a", "b"])
async def test_broken_connections_to_living_pods_prove_nothing(dead: str) -> None:
    world = World("abcd")
    world.dead = dead
    assert await world.pods_tried(BROKE_OFF, BROKE_OFF) == "abc"
    assert not world.failover.quarantine.entries


async def test_suspected_requests_use_bounded_memory() -> None:
    world = World("ab", attempts=2)
    world.dead = "ab"
    for number in range(1010):
        world.started += 10
        await world.pods_tried(BROKE_OFF, BROKE_OFF, attempt=world.first(b"%d" % number))
    assert len(world.failover.quarantine.entries) == len(world.failover.quarantine._crashes) == 1000
    world.failover.quarantine.check(world.first(b"0").request)


def hedged_on(first: Attempt, endpoint: Endpoint) -> Attempt:
    """Return the hedged attempt on another pod, with the same retry state."""
    second = Attempt(first.request, first.decision, endpoint, 0, 0.0)
    second.retries = first.retries = RetryState()
    return second


async def test_the_last_of_two_failed_attempts_is_relayed_if_no_pod_is_left() -> None:
    world = World("ab", attempts=3)
    first = world.first()
    second = hedged_on(first, world.pods[1])
    world.failover.failed_in_race(first, Declined(503))
    assert not world.failover.retries_instead(second, 503)


async def test_a_pod_that_lost_the_race_continues_the_stream_only_if_no_other_pod_is_left() -> None:
    for names, then in (("ab", "b"), ("abc", "c")):
        world = World(names, attempts=2)
        first = world.first()
        world.failover.avoid(first, [world.pods[1]])
        following = await world.failover.next_attempt(first, StreamInterrupted("reset", first.request))
        assert following.endpoint.name == then


async def test_a_stream_goes_on_to_the_next_pod_after_any_error_also_with_a_fallback_model() -> None:
    world = World("abc", attempts=9, on=("connect", "reset"))
    first = _with_fallback(world.first())
    second = await world.failover.next_attempt(first, StreamInterrupted("reset", first.request))
    third = await world.failover.next_attempt(second, Declined(503))
    assert (second.endpoint.name, third.endpoint.name) == ("b", "c")


async def test_a_pod_whose_hedged_attempt_failed_is_not_tried_again_and_may_have_the_same_crash() -> None:
    world = World("abc", attempts=2)
    first = world.first()
    other = world.failover.next_after(first)
    assert other is world.pods[1]
    world.failover.failed_in_race(hedged_on(first, other), REFUSED)
    assert world.failover.next_after(first) is world.pods[2]
    assert (await world.failover.next_attempt(first, REFUSED)).endpoint is world.pods[2]

    world.dead = "ab"
    second = world.first()
    world.failover.failed_in_race(hedged_on(second, other), BROKE_OFF)
    with pytest.raises(SuspectedPoison):
        await world.failover.next_attempt(second, BROKE_OFF)


async def test_a_failed_hedged_attempt_counts_as_one_of_the_attempts() -> None:
    world = World("abcd", attempts=3)
    first = world.first()
    other = world.pods[1]
    world.failover.failed_in_race(hedged_on(first, other), GARBLED)
    assert await world.pods_tried(GARBLED, GARBLED, attempt=first) == "ac AllFailed"


async def test_a_request_bound_to_one_pod_is_not_hedged() -> None:
    world = World("a")
    assert world.failover.next_after(world.first()) is None


async def test_a_broken_stream_continues_with_the_rest_and_is_counted() -> None:
    counted: list[None] = []
    world = World(attempts=3)
    failover = Failover(
        Retries(attempts=3),
        world.clock,
        random.Random(1),
        world.budget,
        Quarantine(world.clock, world._alive, Tasks()),
        world._sleep,
        count_continuation=lambda: counted.append(None),
    )
    first = world.first()
    rest = InferenceRequest("r", "/", "m", first.request.prompt, body=b"rest")
    first.first_byte_at = 5.0
    second = await failover.next_attempt(first, StreamInterrupted("reset", rest))
    second.first_byte_at = 6.0
    third = await failover.next_attempt(second, REFUSED)
    assert [attempt.request for attempt in (second, third)] == [rest, rest]
    assert [attempt.is_continuation for attempt in (first, second, third)] == [False, True, True]
    assert len(counted) == 2
    assert [attempt.stream_started_at for attempt in (first, second, third)] == [None, 5.0, 5.0]


async def test_a_started_response_without_continuation_cannot_be_retried() -> None:
    """A fallback for `AllFailed` cannot serve a client that has half of a response."""
    world = World("a")
    first = world.first()
    update(world.pods[0], state=EndpointState.EJECTED)
    with pytest.raises(BadGateway) as refused:
        await world.failover.next_attempt(first, StreamInterrupted("reset", first.request))
    assert not isinstance(refused.value, AllFailed)


def run_with(world: World, name: str, text: bytes = b"innocent", error: UpstreamFailed | None = None) -> None:
    """Another request that the pod breaks off at this moment, or that fails with `error`."""
    pod = next(pod for pod in world.pods if pod.name == name)
    request = world.first(text).request
    attempt = Attempt(request, Decision(pod), pod, 0, world.clock.now())
    attempt.ending = Ending.UPSTREAM_FAILED
    world.failover.quarantine.ended_with_evidence(attempt, error)


@pytest.mark.parametrize(("status", "is_quarantined"), [(429, True), (404, True), (500, False)])
async def test_a_request_that_a_pod_declined_before_its_crash_proves_nothing_unless_the_pod_failed(
    status: int, is_quarantined: bool
) -> None:
    world = World("abcd")
    world.dead = "ab"
    attempt = await world.failover.next_attempt(world.first(), BROKE_OFF)
    run_with(world, "b", error=Declined(status))
    with contextlib.suppress(SuspectedPoison):
        await world.failover.next_attempt(attempt, BROKE_OFF)
    assert bool(world.failover.quarantine.entries) is is_quarantined


async def test_two_crashes_with_other_requests_do_not_quarantine() -> None:
    world = World("abcd")
    world.dead = "ab"
    attempt = world.first()
    run_with(world, "a")
    attempt = await world.failover.next_attempt(attempt, BROKE_OFF)
    run_with(world, "b")
    attempt = await world.failover.next_attempt(attempt, BROKE_OFF)
    assert attempt.endpoint.name == "c"
    assert not world.failover.quarantine.entries
    world.dead = "abc"
    with pytest.raises(SuspectedPoison):
        await world.failover.next_attempt(attempt, BROKE_OFF)


@pytest.mark.parametrize(("seconds", "last"), [(29.0, "a SuspectedPoison"), (31.0, "ab")])
async def test_crashes_of_requests_with_the_same_prompt_count_together_for_a_minute(seconds: float, last: str) -> None:
    world = World("ab")
    for pause in (seconds, seconds, 2.0):
        world.dead = "a"
        run_with(world, "a")
        found = await world.pods_tried(BROKE_OFF)
        world.dead = ""
        world.clock.advance(pause)
    assert found == last


async def test_equal_requests_that_run_while_pods_crash_are_not_quarantined() -> None:
    world = World("abcd")
    world.dead = "abcd"
    attempts = []
    for pod in world.pods:
        request = world.first().request
        attempts.append(Attempt(request, Decision(pod, tuple(world.pods), "default"), pod, 0, world.clock.now()))
        run_with(world, pod.name)
    world.clock.advance(0.1)
    for attempt in attempts:
        await world.failover.next_attempt(attempt, BROKE_OFF)
    assert not world.failover.quarantine.entries


async def test_a_connection_that_broke_long_before_a_crash_does_not_count() -> None:
    world = World("abcd")
    world.dead = "ab"
    attempt = await world.failover.next_attempt(world.first(), BROKE_OFF)
    run_with(world, "b")
    world.clock.advance(2.0)
    with pytest.raises(SuspectedPoison):
        await world.failover.next_attempt(attempt, BROKE_OFF)


async def test_after_a_crash_the_pod_with_the_fewest_requests_is_next() -> None:
    world = World("abcd")
    world.dead = "a"
    for pod, requests in zip(world.pods[1:], (3, 2, 0), strict=True):
        pod.charge(requests, 0)
    assert await world.pods_tried(BROKE_OFF) == "ad"
    assert await world.pods_tried(GARBLED) == "ab"


async def test_a_pod_that_restarts_and_crashes_again_counts_twice() -> None:
    world = World("a")
    world.dead = "a"
    assert await world.pods_tried(BROKE_OFF, BROKE_OFF) == "aa SuspectedPoison"


async def test_crashes_count_across_fallback_models() -> None:
    world = World("ab")
    world.dead = "ab"
    first = world.first()
    await world.failover.next_attempt(first, BROKE_OFF)
    other = Attempt(with_fresh_state(first.request), Decision(world.pods[1]), world.pods[1], 0, 1001.0)
    with pytest.raises(SuspectedPoison):
        await world.failover.next_attempt(other, BROKE_OFF)
