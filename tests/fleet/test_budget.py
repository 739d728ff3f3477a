"""How often pods may be asked."""

import asyncio
from contextlib import ExitStack

import pytest

from proxy.core.clock import ManualClock
from proxy.fleet.budget import UNSEEN, Budget, metered


def test_a_small_fleet_is_asked_as_often_as_configured() -> None:
    budget = Budget(0.25, 0.05)
    with budget.share():
        budget.charge(0.001)
        assert budget.interval == 0.25


def test_a_large_fleet_is_asked_so_rarely_that_its_share_of_a_core_is_kept() -> None:
    budget = Budget(0.25, 0.05)
    with ExitStack() as fleet:
        for _ in range(1000):
            fleet.enter_context(budget.share())
            budget.charge(0.001 / UNSEEN)
        assert budget.interval == pytest.approx(20.0)
        assert 1000 * budget.cost / budget.interval == pytest.approx(0.05)
    assert budget.interval == 0.25


def test_the_cost_follows_what_rounds_cost_lately() -> None:
    budget = Budget(0.25, 0.05)
    for _ in range(1000):
        budget.charge(0.001)
    for _ in range(1000):
        budget.charge(0.002)
    assert budget.cost == pytest.approx(0.002 * UNSEEN, rel=0.02)


async def test_a_meter_counts_the_steps_and_not_the_waiting() -> None:
    clock, charged = ManualClock(), list[float]()

    async def work() -> str:
        clock.advance(1)
        waiting = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(clock.advance, 100)
        asyncio.get_running_loop().call_soon(waiting.set_result, None)
        await waiting
        clock.advance(2)
        return "done"

    assert await metered(work(), clock, charged.append) == "done"
    assert charged == [3]


async def test_a_meter_lets_cancellation_and_errors_through_and_charges_all_the_same() -> None:
    clock, charged, seen = ManualClock(), list[float](), list[str]()

    async def work() -> None:
        clock.advance(1)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await metered(work(), clock, charged.append)

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await metered(fail(), clock, charged.append)
    assert seen == ["cancelled"]
    assert charged == [1, 0]
