"""How long records are gathered, by how many there are."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from proxy.replicas.outbox import ENOUGH, LATER, Outbox
from proxy.replicas.wire import Kind, record
from tests.replicas.virtual import VirtualLoop

INTERVAL, PATIENCE = 0.01, 5.0
SIZE = len(record(Kind.SESSIONS, bytes(95)))


def batches(gap: float, seconds: float = 4.0) -> list[float]:
    """When batches go out, of records of 100 bytes that come so many seconds after each other."""
    sent: list[float] = []

    async def work() -> None:
        outbox = Outbox(lambda batch: sent.append(asyncio.get_running_loop().time()))
        outbox.pace(INTERVAL, PATIENCE)
        for _ in range(int(seconds / gap)):
            outbox.add(Kind.SESSIONS, bytes(95))
            await asyncio.sleep(gap)
        outbox.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    return [at for at in sent if at > seconds / 2]


def gaps(sent: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(sent)]


def test_where_there_is_much_to_say_the_interval_is_as_it_was_set() -> None:
    assert max(gaps(batches(0.001))) < 2 * INTERVAL


def test_small_batches_are_gathered_for_longer_until_there_is_enough_in_them() -> None:
    found = gaps(batches(0.0101))
    assert sum(found) / len(found) == pytest.approx(ENOUGH / (SIZE / 0.0101), rel=0.5)
    assert max(found) <= INTERVAL * PATIENCE + 2 * 0.0101


def test_where_even_that_would_not_be_enough_nobody_is_made_to_wait() -> None:
    found = gaps(batches(0.05))
    assert max(found) < 0.06


def test_what_comes_alone_is_sent_at_once() -> None:
    waits = [at % 0.05 for at in batches(0.05)]
    assert max(waits) < INTERVAL / 2


def test_what_may_wait_goes_with_what_may_not_and_by_itself_when_its_time_is_over() -> None:
    sent: list[float] = []

    async def work() -> None:
        outbox = Outbox(lambda batch: sent.append(asyncio.get_running_loop().time()), lambda: b"all there is")
        outbox.pace(INTERVAL, PATIENCE, LATER)
        outbox.touch_later()
        await asyncio.sleep(0.001)
        outbox.touch()
        outbox.touch_later()
        await asyncio.sleep(1.0)
        outbox.touch_later()
        await asyncio.sleep(1.0)

    loop = VirtualLoop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    assert sent == pytest.approx([0.001 + INTERVAL, 1.001 + LATER], abs=0.0005)


def test_at_once_is_never_later_than_the_interval() -> None:
    outbox = Outbox(lambda batch: None)
    outbox.pace(0.0005, PATIENCE)
    outbox._follow(1, 0.0)
    assert outbox._interval == 0.0005
