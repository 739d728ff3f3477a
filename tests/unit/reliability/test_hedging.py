"""Hedged attempts: which requests get a second pod, which pod responds, and what the failure of one or both means."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest

from proxy.core.attempt import COMPLETE, Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.errors import BadRequest, UpstreamFailed
from proxy.core.params import Duration
from proxy.core.ports import Admission, ManualClock
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.openai.parse import Parsed
from proxy.reliability.failover import Failover, Quarantine, RetryBudget
from proxy.reliability.hedging import FAILED, LOST, NO_BUDGET, NO_POD, WON, HedgeDelays, Hedging
from proxy.reliability.settings import HedgingSettings, Retries
from proxy.telemetry import metrics

AT_ONCE = Duration(1e-6)
BEGINS = "begins"
GARBLED = UpstreamFailed("nonsense")


class Race:
    """Attempts of one request. Each waits for the response of its pod: BEGINS, or the error that it fails with."""

    def __init__(self, on_start: Callable[[Attempt], None], responses: dict[str, asyncio.Future[Any]]) -> None:
        self.winner: Attempt | None = None
        self._on_start = on_start
        self._responses = responses

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def relay(self, attempt: Attempt) -> None:
        response = await self._responses[attempt.endpoint.name]
        if isinstance(response, Exception):
            raise response
        if self.winner is not None:
            attempt.ending = Ending.EVICTED
            return
        self.winner, attempt.status, attempt.ending = attempt, 200, COMPLETE
        self._on_start(attempt)
        for other in self._responses.values():
            if not other.done():
                other.set_result(BEGINS)


class Full(Admission):
    """Has no capacity for a second attempt, and notes the attempts that it gets."""

    def __init__(self, has_spare_capacity: bool) -> None:
        self._has_spare_capacity = has_spare_capacity
        self.started: list[str] = []

    def has_spare_capacity(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        return self._has_spare_capacity

    def attempt_started(self, attempt: Attempt) -> None:
        self.started.append(attempt.endpoint.name)


class Counted(metrics.Counter):
    def __init__(self, counts: Counter[str], outcome: str) -> None:
        self._counts = counts
        self._outcome = outcome

    def add(self, amount: float = 1.0) -> None:
        self._counts[self._outcome] += int(amount)


class World:
    """Pods a and b; a is the first choice. The relay responds when the test says so."""

    def __init__(
        self,
        after: Duration | None = AT_ONCE,
        pods: str = "ab",
        has_spare_capacity: bool = True,
        percent: float = 100.0,
    ):
        self.clock = ManualClock(now=1000.0)
        self.pods = [Endpoint(name, state=EndpointState.READY) for name in pods]
        self.counts: Counter[str] = Counter()
        self.admission = Full(has_spare_capacity)
        self.admissions = (self.admission,)
        self.events: list[str] = []
        self.responses: dict[str, asyncio.Future[Any]] = {}
        self.races = True
        settings = HedgingSettings(after=after)
        poison = Quarantine(self.clock, self._alive, Tasks())
        failover = Failover(Retries(), self.clock, random.Random(1), RetryBudget(20.0, self.clock, lambda: 0), poison)
        budget = RetryBudget(percent, self.clock, lambda: 0, per_second=0.0, most=1.0 if percent else 0.0)
        self.hedging = Hedging(
            settings, failover, self.clock, HedgeDelays(settings), budget, lambda outcome: Counted(self.counts, outcome)
        )

    def request(self, **fields: Any) -> InferenceRequest:
        return InferenceRequest("r", "/v1/chat/completions", "m", **{"body": b"{}", **fields})

    async def send(self, request: InferenceRequest | None = None) -> Attempt:
        """Place a request on the first pod, as the gateway does; return the first attempt."""
        target, *others = self.pods
        request = request or self.request()
        first = Attempt(request, Decision(target, tuple(others), "default"), target, 0, self.clock.now())
        self.responses = {pod.name: asyncio.get_running_loop().create_future() for pod in self.pods}

        async def serve_in(
            pool: World, request: InferenceRequest, parsed: Parsed, relay: World, *, sender: Any
        ) -> None:
            if sender is None:
                self.events.append("not hedged")
            else:
                await sender.run(first)

        await self.hedging.around(serve_in, self._running)(self, request, Parsed("m", b"{}"), self)
        return first

    def race(self, on_start: Callable[[Attempt], None]) -> Race | None:
        return Race(on_start, self.responses) if self.races else None

    async def relay(self, attempt: Attempt) -> None:
        attempt.status, attempt.ending = 200, COMPLETE

    @contextmanager
    def _running(self, attempt: Attempt) -> Iterator[None]:
        self.events.append(f"+{attempt.endpoint.name}")
        try:
            yield
        finally:
            self.events.append(f"-{attempt.endpoint.name}")

    async def _alive(self, endpoint: Endpoint) -> bool:
        return True


async def sent(world: World, **responses: object) -> Attempt:
    """Send a request. When both pods have it, they respond in this order."""

    async def respond() -> None:
        while world.events.count("+b") + world.counts.total() < 1:
            await asyncio.sleep(0)
        for name, result in responses.items():
            if not world.responses[name].done():
                world.responses[name].set_result(result)
            for _ in range(3):
                await asyncio.sleep(0)

    attempt, _ = await asyncio.gather(world.send(), respond())
    return attempt


async def test_the_second_pod_responds_if_it_starts_first_and_each_attempt_ends() -> None:
    world = World()
    first = await sent(world, b=BEGINS)
    assert world.counts == {WON: 1}
    assert world.events[:2] == ["+a", "+b"]
    assert sorted(world.events[2:]) == ["-a", "-b"]
    assert first.ending is Ending.EVICTED
    assert world.admission.started == ["b"]  # the admission counts the attempt that responds


async def test_the_first_pod_may_still_respond() -> None:
    world = World()
    first = await sent(world, a=BEGINS)
    assert world.counts == {LOST: 1}
    assert first.ending is COMPLETE
    assert world.admission.started == []


async def test_a_failure_of_one_pod_is_hidden_if_the_other_responds() -> None:
    world = World()
    await sent(world, a=GARBLED, b=BEGINS)
    assert world.counts == {WON: 1}


async def test_two_failures_are_the_failure_of_the_first_and_neither_is_retried() -> None:
    world = World(pods="abc")
    error = UpstreamFailed("of the first")
    with pytest.raises(UpstreamFailed, match="of the first"):
        await sent(world, b=GARBLED, a=error)
    assert world.counts == {FAILED: 1}


async def test_a_fault_of_the_request_ends_both_attempts_at_once() -> None:
    world = World()
    with pytest.raises(BadRequest, match="the upload broke off"):
        await sent(world, b=BadRequest("the upload broke off"))
    assert sorted(world.events) == ["+a", "+b", "-a", "-b"]


@pytest.mark.parametrize(
    ("world", "outcome"),
    [
        (World(pods="a"), NO_POD),
        (World(has_spare_capacity=False), NO_POD),
        (World(percent=0.0), NO_BUDGET),
    ],
    ids=["no other pod", "no room", "no budget"],
)
async def test_without_a_free_pod_or_budget_the_first_pod_is_waited_for(world: World, outcome: str) -> None:
    first = await sent(world, a=BEGINS)
    assert world.counts == {outcome: 1}
    assert world.events == ["+a", "-a"]
    assert first.ending is COMPLETE


async def test_a_pod_with_a_queue_gets_no_hedged_attempt() -> None:
    world = World()
    world.pods[1].publish(Metrics(waiting=3, running=8, freshness=Freshness.FRESH), 0)
    await sent(world, a=BEGINS)
    assert world.counts == {NO_POD: 1}


async def test_a_request_that_cannot_be_hedged_has_one_attempt() -> None:
    world = World()
    world.races = False
    await world.send()
    assert world.events == ["+a", "-a"]
    assert not world.counts


@pytest.mark.parametrize(
    "fields",
    [{"body": b""}, {"path": "/v1/responses"}, {"priority": -1}],
    ids=["no body", "stored response", "low priority"],
)
async def test_some_requests_are_never_hedged(fields: dict[str, Any]) -> None:
    world = World()
    request = {"id": "r", "path": "/v1/chat/completions", "model": "m", "body": b"{}", **fields}
    await world.send(InferenceRequest(**request))
    assert world.events == ["not hedged"]


async def test_without_enough_times_nothing_is_late_and_times_of_the_first_pod_are_learnt() -> None:
    world = World(after=None)
    world.races = False
    for _ in range(60):
        attempt = await world.send()
        assert attempt.succeeded
    assert world.hedging.delays.of(world.request()) == 0.0
