from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from mmap import mmap
from pathlib import Path

import pytest

from proxy.cluster import gc_tuning
from proxy.cluster.gc_tuning import GROWTH, LEAST_GROWTH, NEVER, Collector, resident
from tests.helpers.waiting import PATIENCE

MIB = 1 << 20
START = 400 * MIB
BARELY = int(START * (1 + GROWTH / 2)) + MIB
FAR = int(START * (1 + GROWTH)) + MIB

steps_by_itself = pytest.mark.skipif(
    (3, 14) <= sys.version_info < (3, 14, 5), reason="full collections come in steps by themselves"
)


class Knot:
    """A cycle of its own."""

    def __init__(self) -> None:
        self.self = self


class Situation:
    """What a collector asks of the process around it."""

    def __init__(self, memory: int = START) -> None:
        self.memory = memory
        self.idle = False

    @asynccontextmanager
    async def collector(self) -> AsyncIterator[Collector]:
        async with Collector(lambda: self.idle, lambda: self.memory) as entered:
            yield entered


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("memory", "idle", "collects"),
    [
        (START, True, False),
        (START, False, False),
        (BARELY - 2 * MIB, True, False),
        (BARELY, True, True),
        (BARELY, False, False),
        (FAR, False, True),
        (FAR, True, True),
    ],
)
async def test_a_full_collection_runs_when_memory_has_grown_and_earlier_when_idle(
    memory: int, idle: bool, collects: bool
) -> None:
    situation = Situation()
    async with situation.collector() as collector:
        knot = old_knot()
        situation.memory, situation.idle = memory, idle
        assert collector.check() is collects
        assert (knot() is None) is collects


async def test_a_small_process_may_grow_by_more_than_half_before_requests_wait() -> None:
    situation = Situation(50 * MIB)
    async with situation.collector() as collector:
        situation.memory += LEAST_GROWTH
        assert not collector.check()
        situation.memory += 1
        assert collector.check()


async def test_memory_in_use_is_not_collected_repeatedly() -> None:
    situation = Situation()
    async with situation.collector() as collector:
        situation.memory, situation.idle = FAR, True
        assert [collector.check() for _ in range(3)] == [True, False, False]
        situation.memory += int(FAR * GROWTH / 2) + 1
        assert collector.check()


@steps_by_itself
async def test_python_starts_no_full_collection_with_any_number_of_objects() -> None:
    full: list[int] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(info["collected"])

    async with Situation().collector():
        gc.callbacks.append(watch)
        try:
            assert gc.get_threshold()[2] == NEVER
            kept = [[number] for number in range(200_000)]
        finally:
            gc.callbacks.remove(watch)
    assert (len(kept), full) == (200_000, [])


async def test_young_cycles_are_collected_as_usual() -> None:
    async with Situation().collector():
        knots = [weakref.ref(Knot()) for _ in range(100_000)]
    assert sum(knot() is not None for knot in knots) < 50_000


async def test_objects_from_the_start_are_never_scanned() -> None:
    knot = Knot()
    watched = weakref.ref(knot)
    async with Situation().collector():
        del knot
        gc.collect()
        assert watched() is not None
    gc.collect()
    assert watched() is None


async def test_memory_is_checked_continuously(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "INTERVAL", 0.01)
    situation = Situation()
    async with situation.collector():
        knot = old_knot()
        situation.memory = FAR
        async with asyncio.timeout(PATIENCE):
            while knot() is not None:
                await asyncio.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere it is the most there ever was")
def test_the_memory_of_the_process_is_its_current_size() -> None:
    before = resident()
    with mmap(-1, 64 * MIB) as ballast:
        ballast.write(b"x" * len(ballast))
        during = resident()
    assert during - before > 32 * MIB
    assert during - resident() > 32 * MIB


def test_without_a_current_size_the_peak_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now = resident()
    monkeypatch.setattr(gc_tuning, "_STATM", Path("/nowhere/statm"))
    assert now * 0.9 < resident() < now * 100


def old_knot() -> weakref.ref[Knot]:
    """A dead cycle that young collections do not see any more."""
    knot = Knot()
    for _ in range(3):
        gc.collect(1)
    return weakref.ref(knot)
