"""Which silent responses are still waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics, join_ranks, update
from proxy.core.params import Duration
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.fleet.store import Fleet
from proxy.reliability.health import CHECKS_PER_PROBE, GAP, LONGEST, SILENT, STALLED, Liveness
from proxy.reliability.settings import HealthSettings

STALL = 30.0


class World:
    """A pod that is scraped every second, and a response of it that the sweep checks as often."""

    def __init__(self, pod: Endpoint | None = None) -> None:
        self.clock = ManualClock(now=1000.0)
        self.pod = pod or Endpoint("a")
        self.reasons: set[str] = set()
        self.lost: float | None = None
        self.works: bool | None = False
        self.questions = 0
        self.woken = asyncio.Event()
        self.liveness = Liveness(
            HealthSettings(stall=Duration(STALL)), self.clock, cast(Fleet, self), self._works, self._sleep
        )
        self.attempt = Attempt(InferenceRequest("r", "/", "m"), Decision(self.pod), self.pod, 0, self.clock.now())
        self.scrape()

    def eject(self, endpoint: Endpoint, why: str) -> None:
        self.reasons.add(why)

    def uneject(self, endpoint: Endpoint, why: str) -> None:
        self.reasons.discard(why)

    def lost_at(self, endpoint: Endpoint, sent_at: float) -> float | None:
        return self.lost

    def scrape(self, progress: float = 7.0, **changes: object) -> None:
        metrics = Metrics(prompt_tokens=progress, freshness=Freshness.FRESH, scraped_at=self.clock.now(), **changes)  # type: ignore[arg-type]
        self.pod.publish(metrics, 0)

    def check(self) -> str:
        return self.liveness.reason_to_give_up(self.attempt, self.attempt.started_at)

    def stand_still(self, seconds: int, progress: float = 7.0) -> str:
        why = ""
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.scrape(progress)
            why = self.check()
        return why

    async def pass_checks(self, number: int) -> None:
        await asyncio.sleep(0)
        for _ in range(number):
            self.clock.advance(1.0)
            self.woken.set()
            for _ in range(5):
                await asyncio.sleep(0)

    async def _sleep(self, seconds: float) -> None:
        self.woken.clear()
        await self.woken.wait()

    async def _works(self, endpoint: Endpoint) -> bool | None:
        self.questions += 1
        return self.works


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    async with found.liveness:
        yield found


async def test_an_engine_without_progress_while_requests_wait_is_ejected(world: World) -> None:
    assert world.stand_still(30) == ""
    assert world.reasons == set()
    assert STALLED in world.stand_still(1)
    assert world.reasons == {STALLED}


@pytest.mark.parametrize("what", ["progress", "prefix_queries", "waiting", "running", "kv_usage"])
async def test_any_moving_counter_is_progress(world: World, what: str) -> None:
    for number in range(100):
        world.clock.advance(1.0)
        world.scrape(**{what: number % 2})
        assert world.check() == ""
    assert world.reasons == set()


async def test_an_engine_that_has_computed_no_token_yet_may_be_stalled(world: World) -> None:
    assert STALLED in world.stand_still(32, progress=0.0)


async def test_no_task_is_left_after_a_stalled_engine_was_watched() -> None:
    world, before = World(), asyncio.all_tasks()
    async with world.liveness:
        world.stand_still(31)
        assert asyncio.all_tasks() != before
    assert asyncio.all_tasks() == before


async def test_an_idle_pod_may_stand_still(world: World) -> None:
    world.stand_still(20)
    world.clock.advance(GAP + 15.0)
    world.scrape()
    world.check()
    assert world.stand_still(29) == ""
    assert world.reasons == set()


@pytest.mark.parametrize("stale", [True, False])
async def test_unknown_counters_are_not_a_stall(world: World, stale: bool) -> None:
    for _ in range(100):
        world.clock.advance(1.0)
        freshness = Freshness.STALE if stale else Freshness.FRESH
        world.pod.publish(
            Metrics(prompt_tokens=7.0 if stale else -1.0, freshness=freshness, scraped_at=world.clock.now()), 0
        )
        assert world.check() == ""


async def test_a_late_scrape_is_not_a_stall(world: World) -> None:
    for _ in range(100):
        world.clock.advance(1.0)
        assert world.check() == ""


async def test_a_started_stream_has_its_own_timeout(world: World) -> None:
    world.attempt.first_byte_at = world.clock.now()
    assert world.stand_still(40) == ""
    assert world.reasons == {STALLED}


async def test_it_is_restored_when_its_counters_move(world: World) -> None:
    world.stand_still(31)
    await world.pass_checks(1)
    assert world.reasons == {STALLED}
    world.scrape(8.0)
    await world.pass_checks(1)
    assert world.reasons == set()
    assert world.check() == ""


async def test_it_gets_a_probe_and_is_restored_by_it(world: World) -> None:
    world.stand_still(31)
    await world.pass_checks(2 * CHECKS_PER_PROBE)
    assert (world.reasons, world.questions) == ({STALLED}, 2)
    world.works = True
    await world.pass_checks(CHECKS_PER_PROBE)
    assert world.reasons == set()


async def test_after_a_while_requests_try_it(world: World) -> None:
    world.works = None
    world.stand_still(31)
    await world.pass_checks(int(LONGEST) - 1)
    assert world.reasons == {STALLED}
    await world.pass_checks(1)
    assert world.reasons == set()


async def test_a_restart_ends_the_ejection(world: World) -> None:
    world.stand_still(31)
    world.liveness.forget(world.pod)
    assert world.reasons == set()
    assert world.check() == ""


async def test_a_pod_with_two_hung_ranks_is_restored_when_both_move() -> None:
    ranks = [Endpoint(f"a/{number}", rank=number) for number in range(3)]
    join_ranks(ranks)
    world = World(ranks[0])
    async with world.liveness:
        world.stand_still(31)
        world.pod = ranks[1]
        world.attempt = Attempt(world.attempt.request, Decision(world.pod), world.pod, 0, world.clock.now())
        world.stand_still(32)
        world.scrape(8.0)
        await world.pass_checks(1)
        assert world.reasons == {STALLED}, "the first rank hangs"
        world.pod = ranks[0]
        world.scrape(8.0)
        await world.pass_checks(1)
        assert world.reasons == set()


async def test_nothing_is_kept_of_a_removed_pod_whose_response_is_silent(world: World) -> None:
    world.stand_still(2)
    world.liveness.forget(world.pod)
    update(world.pod, state=EndpointState.GONE)
    assert world.check() == ""
    assert world.liveness._progress == {}


async def test_a_response_of_an_unreachable_pod_is_given_up_after_its_silence(world: World) -> None:
    world.clock.advance(100.0)
    world.lost = world.clock.now()
    assert world.check() == ""
    world.clock.advance(SILENT - 0.1)
    assert world.check() == ""
    world.clock.advance(0.1)
    assert "refuses connections or was restarted" in world.check()
    assert world.liveness.reason_to_give_up(world.attempt, world.clock.now() - 1.0) == ""
