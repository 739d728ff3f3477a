"""Active health checks, with a pod whose responses the test sets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import orjson
import pytest

from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.errors import ConnectRefused, OutOfFiles, UpstreamFailed
from proxy.core.params import Duration
from proxy.fleet.store import Fleet
from proxy.reliability.health import FAILS_INFERENCE, UNHEALTHY, HealthChecks, Hook, Streak
from proxy.reliability.settings import HealthSettings, InferenceCheck
from tests.helpers.waiting import until

FAST = Duration(0.001)


class World:
    """One pod; `says` is the status of its response, or what is raised instead."""

    def __init__(self) -> None:
        self.pod = Endpoint("a", "http://a", state=EndpointState.READY, models=frozenset({"m", "lora"}))
        update(self.pod, adapters=frozenset({"lora"}))
        self.says: int | Exception = 200
        self.hangs = False
        self.queried: list[str] = []
        self.bodies: list[bytes] = []
        self.reasons: set[str] = set()
        self.failures: list[str] = []
        self.unwatched = False

    def watch(self, added: Hook, removed: Hook) -> Callable[[], None]:
        added(self.pod)
        self.removed = removed
        return lambda: setattr(self, "unwatched", True)

    def eject(self, endpoint: Endpoint, why: str) -> None:
        self.reasons.add(why)

    def uneject(self, endpoint: Endpoint, why: str) -> None:
        self.reasons.discard(why)

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        self.queried.append(url)
        if self.hangs:
            await asyncio.sleep(3600)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says, b""

    async def post(self, url: str, body: bytes, api_key: str | None, rank: int | None = None) -> tuple[int, bytes]:
        self.bodies.append(body)
        return await self.get(url, api_key)

    async def rounds(self, number: int) -> None:
        seen = len(self.queried)
        await until(lambda: len(self.queried) >= seen + number)

    @asynccontextmanager
    async def checked(self, settings: HealthSettings | None = None) -> AsyncIterator[None]:
        chosen = settings or HealthSettings(interval=FAST, timeout=Duration(0.01))
        fail = lambda endpoint, kind: self.failures.append(kind)  # noqa: E731
        async with HealthChecks(chosen, self.watch, cast(Fleet, self), self, random.Random(1), fail):
            yield


async def test_an_unhealthy_pod_is_ejected_until_it_is_healthy() -> None:
    world = World()
    async with world.checked():
        await world.rounds(3)
        assert (world.reasons, world.failures) == (set(), [])
        world.says = 503
        await until(lambda: world.reasons == {UNHEALTHY})
        assert len(world.failures) >= 2
        world.says = 200
        await until(lambda: not world.reasons)
        assert set(world.queried) == {"http://a/health"}


@pytest.mark.parametrize("says", [UpstreamFailed("reset"), 500])
async def test_a_missing_response_fails_the_check(says: int | Exception) -> None:
    world = World()
    world.says = says
    async with world.checked():
        await until(lambda: world.reasons == {UNHEALTHY})


async def test_a_late_response_fails_the_check() -> None:
    world = World()
    world.hangs = True
    async with world.checked():
        await until(lambda: world.reasons == {UNHEALTHY})


@pytest.mark.parametrize("says", [404, 405, 501, ConnectRefused("")])
async def test_a_pod_without_the_path_or_a_refusing_one_is_not_judged(says: int | Exception) -> None:
    world = World()
    world.says = says
    async with world.checked():
        await world.rounds(10)
        assert (world.reasons, world.failures) == (set(), [])


async def test_a_pod_that_crashed_is_not_unhealthy_when_it_returns() -> None:
    world = World()
    world.says = 503
    async with world.checked():
        await until(lambda: world.reasons == {UNHEALTHY})
        world.says = ConnectRefused("")
        await until(lambda: not world.reasons)


async def test_starting_pods_are_not_checked() -> None:
    world = World()
    update(world.pod, state=EndpointState.STARTING)
    async with world.checked():
        await asyncio.sleep(0.02)
        assert world.queried == []


async def test_an_idle_engine_must_generate_a_token() -> None:
    world = World()
    inference = InferenceCheck(interval=FAST, timeout=Duration(0.01))
    async with world.checked(HealthSettings(path=None, inference=inference)):
        await world.rounds(3)
        body = orjson.loads(world.bodies[0])
        assert (body["model"], body["max_tokens"]) == ("m", 1)
        assert set(world.queried) == {"http://a/v1/completions"}
        world.hangs = True
        await until(lambda: world.reasons == {FAILS_INFERENCE})
        assert "inference" in world.failures
        world.hangs = False
        await until(lambda: not world.reasons)


async def test_a_busy_engine_gets_no_inference_check() -> None:
    world = World()
    world.pod.charge(1, 0)
    async with world.checked(HealthSettings(path=None, inference=InferenceCheck(interval=FAST))):
        await asyncio.sleep(0.02)
        assert world.queried == []


async def test_a_pod_that_fails_its_inference_check_is_checked_although_it_is_busy() -> None:
    world = World()
    inference = InferenceCheck(interval=FAST, timeout=Duration(0.01))
    async with world.checked(HealthSettings(path=None, inference=inference)):
        world.hangs = True
        await until(lambda: world.reasons == {FAILS_INFERENCE})
        world.pod.charge(1, 0)
        await asyncio.sleep(0.05)
        assert world.reasons == {FAILS_INFERENCE}
        world.hangs = False
        await until(lambda: not world.reasons)


async def test_a_pod_that_refuses_completions_is_not_judged_by_them() -> None:
    world = World()
    world.says = 404
    async with world.checked(HealthSettings(path=None, inference=InferenceCheck(interval=FAST))):
        await world.rounds(5)
        assert world.reasons == set()


async def test_when_checks_are_disabled_their_reasons_end() -> None:
    world = World()
    world.says = 503
    async with world.checked():
        await until(lambda: world.reasons == {UNHEALTHY})
    assert (world.reasons, world.unwatched) == (set(), True)


async def test_a_removed_pod_is_no_longer_checked() -> None:
    world = World()
    async with world.checked():
        await world.rounds(1)
        world.removed(world.pod)
        await asyncio.sleep(0)
        before = len(world.queried)
        await asyncio.sleep(0.02)
        assert len(world.queried) == before


def test_only_consecutive_failures_count() -> None:
    streak = Streak(failures=2, successes=2)
    seen = [(streak.add(good), streak.is_failing) for good in (False, True, False, False, True, False, True, True)]
    assert seen == [
        (False, False),
        (False, False),
        (False, False),
        (True, True),
        (False, True),
        (False, True),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize("inference", [None, InferenceCheck(interval=FAST, timeout=Duration(0.01))])
async def test_checks_that_fail_for_lack_of_descriptors_change_nothing(inference: InferenceCheck | None) -> None:
    world = World()
    world.says = OutOfFiles("no connection")
    async with world.checked(HealthSettings(interval=FAST, timeout=Duration(0.01), inference=inference)):
        await world.rounds(10)
        assert (world.reasons, world.failures) == (set(), [])
        world.says = 503
        await until(lambda: UNHEALTHY in world.reasons)
        world.says = OutOfFiles("no connection")
        await world.rounds(10)
        assert UNHEALTHY in world.reasons
