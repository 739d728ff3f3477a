"""Limits of keys, shared by workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from proxy.auth.limits import RateLimiter
from proxy.auth.settings import Limits
from proxy.cluster.messages import InvalidMessage, RecordKind
from proxy.cluster.replica import BEATS, LEASE
from proxy.cluster.shared import RECENT, SharedLimits
from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import RateLimited
from proxy.core.ports import IDENTITY, Identity, ManualClock
from proxy.core.request import InferenceRequest

POD = Endpoint("a")
ALICE = Identity("alice", "acme", limits="own")


class Worker:
    identity = ALICE

    def __init__(self, number: int, clock: ManualClock, **limits: int) -> None:
        self.number = number
        self.limiter = RateLimiter({"own": Limits(**limits)}, {}, clock, self.limited)  # type: ignore[arg-type]
        self.shared = SharedLimits(self.limiter, self.receive, LEASE)
        self.peers: list[Worker] = []

    def limited(self, kind: str, name: str, shadow: bool) -> None: ...

    def receive(self, kind: RecordKind, body: bytes) -> None:
        for peer in self.peers:
            peer.shared.receive(self.number, kind, body)

    def request(self) -> InferenceRequest:
        request = InferenceRequest("r", "/", "m", max_tokens=10)
        request.state.write(IDENTITY, self.identity)
        return request

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A request, from admission to its end, that came to a pod."""
        request = self.request()
        async with self.limiter.admit(request):
            attempt = Attempt(request, Decision(POD), POD, 0, 0.0)
            self.limiter.attempt_started(attempt)
            attempt.sent_at = 0.0
            yield

    async def ask(self) -> None:
        async with self.running():
            pass


def host(workers: int = 2, **limits: int) -> list[Worker]:
    clock = ManualClock()
    crew = [Worker(number, clock, **limits) for number in range(1, workers + 1)]
    for worker in crew:
        worker.peers = [other for other in crew if other is not worker]
    return crew


async def test_charges_of_one_worker_count_in_the_others() -> None:
    first, second = host(requests_per_minute=2)
    await first.ask()
    await second.ask()
    for worker in (first, second):
        with pytest.raises(RateLimited):
            await worker.ask()


async def test_running_requests_of_other_workers_count() -> None:
    first, second = host(concurrent_requests=1)
    async with first.running():
        with pytest.raises(RateLimited):
            await second.ask()
    await second.ask()


async def test_a_refund_applies_everywhere() -> None:
    first, second = host(tokens_per_minute=15)
    await first.ask()
    await second.ask()
    await first.ask()


async def test_running_requests_of_a_stopped_worker_no_longer_count() -> None:
    first, second = host(concurrent_requests=1)
    async with first.running():
        second.shared.vanished(first.number)
        await second.ask()


async def test_a_new_worker_gets_the_state_and_a_repeated_state_changes_nothing() -> None:
    first, second, third = host(3, requests_per_minute=3, concurrent_requests=2)
    first.peers = [second]
    async with first.running():
        for _ in range(2):
            for kind, body in [*first.shared.current(), *first.shared.lasting(1.0)]:
                third.shared.receive(first.number, kind, body)
        async with third.running():
            with pytest.raises(RateLimited, match="at the same time"):
                await third.ask()
        await third.ask()
        with pytest.raises(RateLimited, match="3 requests per minute"):
            await third.ask()


async def test_the_current_state_has_the_total_of_a_recent_charge_that_a_peer_missed() -> None:
    first, second = host(requests_per_minute=1)
    first.peers = []
    await first.ask()
    for kind, body in first.shared.current():
        second.shared.receive(first.number, kind, body)
    with pytest.raises(RateLimited):
        await second.ask()


async def test_only_keys_with_running_requests_or_recent_charges_are_current_state() -> None:
    first, _ = host(requests_per_minute=3)
    await first.ask()
    assert isinstance(first.limiter.clock, ManualClock)
    first.limiter.clock.advance(RECENT + 1)
    assert list(first.shared.current()) == []
    assert len(list(first.shared.lasting(1.0))) == 1


async def test_a_charge_is_current_state_until_a_peer_with_a_long_lease_has_noticed_that_it_missed_it() -> None:
    lease = 60.0
    first, second = host(requests_per_minute=1)
    first.shared = SharedLimits(first.limiter, lambda *_: None, lease)
    await first.ask()
    assert isinstance(first.limiter.clock, ManualClock)
    first.limiter.clock.advance(lease / BEATS + 1.0)
    for kind, body in first.shared.current():
        second.shared.receive(first.number, kind, body)
    assert [round(used[0], 3) for _, _, used in second.limiter.known()] == [round(1 - 13 / 60, 3)]


async def test_charges_count_while_only_one_worker_has_reloaded_other_limits_of_a_key() -> None:
    first, second = host(requests_per_minute=2)
    await first.ask()
    second.limiter.limits = {"new": Limits(requests_per_minute=3)}
    second.identity = replace(ALICE, limits="new")
    await second.ask()
    with pytest.raises(RateLimited):
        await first.ask()
    first.limiter.limits, first.identity = second.limiter.limits, second.identity
    await first.ask()
    for worker in (first, second):
        with pytest.raises(RateLimited):
            await worker.ask()


async def test_limits_unknown_here_are_skipped() -> None:
    _, second = host(requests_per_minute=1)
    second.limiter.peer_spent(1, ("key", "alice", "other"), 1, (1.0, 0.0, 0.0, 0.0, 0.0))
    await second.ask()


@pytest.mark.parametrize("body", [b"", b"1", b"[1]", b'[[["key","a"],1,[1]]]', b'[[["key","a","l"],"x",[1,1,1,1,1]]]'])
def test_malformed_messages_are_refused(body: bytes) -> None:
    first, _ = host()
    with pytest.raises(InvalidMessage):
        first.shared.receive(2, RecordKind.SPENT, body)
