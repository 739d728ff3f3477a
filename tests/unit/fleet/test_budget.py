"""The budget that limits how often pods are scraped."""

import asyncio
from contextlib import ExitStack

import pytest

from proxy.core.ports import ManualClock
from proxy.fleet.refresh import UNMEASURED_FACTOR, PodBudget, ScrapeBudget, metered


def test_a_small_fleet_is_scraped_at_the_configured_interval() -> None:
    pod = PodBudget(ScrapeBudget(0.25, 0.05))
    with pod:
        pod.charge(0.001)
        assert pod.interval == 0.25


def test_a_large_fleet_is_scraped_within_its_share_of_a_core() -> None:
    budget = ScrapeBudget(0.25, 0.05)
    pods = [PodBudget(budget) for _ in range(1000)]
    with ExitStack() as fleet:
        for number, pod in enumerate(pods):
            fleet.enter_context(pod)
            pod.charge((0.0005 + 0.001 * (number % 2)) / UNMEASURED_FACTOR)
        assert pods[0].interval == pytest.approx(10.0)
        assert sum(pod.cost / pod.interval for pod in pods) == pytest.approx(0.05)
    assert pods[0].interval == 0.25


def test_an_expensive_pod_stretches_only_its_own_interval() -> None:
    budget = ScrapeBudget(0.25, 0.05)
    cheap, expensive, joined = PodBudget(budget), PodBudget(budget), PodBudget(budget)
    with cheap:
        with expensive:
            for _ in range(50):
                cheap.charge(0.001 / UNMEASURED_FACTOR)
                expensive.charge(0.1 / UNMEASURED_FACTOR)
            assert cheap.interval == 0.25
            assert expensive.interval == pytest.approx(2 * 0.1 / 0.05, rel=0.3)
        with joined:
            joined.charge(0.001 / UNMEASURED_FACTOR)
            assert joined.interval == cheap.interval == 0.25


def test_a_pause_of_the_process_during_one_round_hardly_stretches_an_interval() -> None:
    budget = ScrapeBudget(0.001, 0.05)
    pod, joined = PodBudget(budget), PodBudget(budget)
    with pod:
        for _ in range(20):
            pod.charge(0.001)
        usual = pod.interval
        pod.charge(3.0)
        assert usual < pod.interval < 1.2 * usual
        pod.charge(0.001)
        with joined:
            joined.charge(3.0)
            assert joined.interval < 10 * usual


def test_a_pause_of_the_process_during_its_very_first_round_hardly_stretches_an_interval() -> None:
    budget = ScrapeBudget(0.25, 0.05)
    pods = [PodBudget(budget) for _ in range(20)]
    with ExitStack() as fleet:
        for pod in pods:
            fleet.enter_context(pod)
        pods[0].charge(3.0)
        assert pods[0].interval < 5.0
        pods[0].charge(0.001)
        assert pods[0].interval < 2.5


def test_the_cost_follows_recent_rounds() -> None:
    pod = PodBudget(ScrapeBudget(0.25, 0.05))
    for _ in range(100):
        pod.charge(0.001)
    for _ in range(100):
        pod.charge(0.002)
    assert pod.cost == pytest.approx(0.002 * UNMEASURED_FACTOR, rel=0.02)


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


async def test_a_meter_passes_cancellation_and_errors_and_charges_them() -> None:
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
