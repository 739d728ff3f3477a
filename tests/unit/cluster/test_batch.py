"""How long records are gathered, by how many there are."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from proxy.cluster.messages import RecordKind, record
from proxy.cluster.transport import ENOUGH, LATER, LOCAL_LATER, Batch
from tests.helpers.cluster.virtual import VirtualLoop

INTERVAL, PATIENCE = 0.01, 5.0
SIZE = len(record(RecordKind.SESSIONS, bytes(95)))


def batches(gap: float, seconds: float = 4.0) -> list[float]:
    """When batches go out, of records of 100 bytes that come so many seconds after each other."""
    sent: list[float] = []

    async def work() -> None:
        gathered = Batch(lambda batch: sent.append(asyncio.get_running_loop().time()))
        gathered.pace(INTERVAL, PATIENCE)
        for _ in range(int(seconds / gap)):
            gathered.add(RecordKind.SESSIONS, bytes(95))
            await asyncio.sleep(gap)
        gathered.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    return [at for at in sent if at > seconds / 2]


def gaps(sent: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(sent)]


def test_under_load_the_interval_is_the_configured_one() -> None:
    assert max(gaps(batches(0.001))) < 2 * INTERVAL


def test_small_batches_are_collected_for_longer() -> None:
    found = gaps(batches(0.0101))
    assert sum(found) / len(found) == pytest.approx(ENOUGH / (SIZE / 0.0101), rel=0.5)
    assert max(found) <= INTERVAL * PATIENCE + 2 * 0.0101


def test_collection_is_not_extended_if_it_would_not_suffice() -> None:
    found = gaps(batches(0.05))
    assert max(found) < 0.06


def test_a_single_update_is_sent_at_once() -> None:
    waits = [at % 0.05 for at in batches(0.05)]
    assert max(waits) < INTERVAL / 2


Touches = list[tuple[float, str]]


def batches_sent(touches: Touches, *pace: float) -> list[tuple[float, bytes]]:
    """Return the batches that are sent, with their times, after these touches."""
    found: list[tuple[float, bytes]] = []
    waiting = {"touch": b"", "touch_later": b""}

    def taken(which: str) -> bytes:
        batch, waiting[which] = waiting[which], b""
        return batch

    async def work() -> None:
        loop = asyncio.get_running_loop()
        gathered = Batch(lambda batch: found.append((loop.time(), batch)), lambda: taken("touch_later"))
        gathered.urgent = lambda: taken("touch")
        gathered.pace(*pace)
        for at, which in touches:
            await asyncio.sleep(at - loop.time())
            waiting["touch" if which == "touch_soon" else which] += b"r" if which == "touch_later" else b"u"
            getattr(gathered, which)()
        await asyncio.sleep(1.0)

    loop = VirtualLoop()
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    return [(round(at, 3), batch) for at, batch in found]


def test_deferrable_updates_are_sent_at_their_deadline_and_urgent_ones_before() -> None:
    touches = [(0.0, "touch_later"), (0.001, "touch"), (0.003, "touch"), (0.02, "touch_later")]
    assert batches_sent(touches, INTERVAL, PATIENCE, LATER) == [(0.011, b"uu"), (LATER, b"rr")]


def test_deferrable_updates_join_the_last_batch_before_their_deadline() -> None:
    touches = [(0.0, "touch_later"), (0.085, "touch")]
    assert batches_sent(touches, INTERVAL, PATIENCE, LATER) == [(0.095, b"ur")]


def test_urgent_updates_join_deferrable_ones_that_are_due() -> None:
    touches = [(0.0, "touch_later"), (0.095, "touch")]
    assert batches_sent(touches, INTERVAL, PATIENCE, LATER) == [(LATER, b"ur")]


def test_under_light_load_nothing_is_deferred() -> None:
    touches = [(0.0, "touch_later"), (0.5, "touch"), (0.5, "touch_later")]
    assert batches_sent(touches, INTERVAL, PATIENCE, LATER) == [(LATER, b"r"), (0.501, b"ur")]


def test_a_long_prompt_is_published_within_two_milliseconds() -> None:
    touches = [(0.0, "touch_later"), (0.003, "touch"), (0.004, "touch_soon"), (0.0055, "touch_soon"), (0.007, "touch")]
    assert batches_sent(touches, INTERVAL, PATIENCE, LATER) == [(0.006, b"uuu"), (0.017, b"u"), (LATER, b"r")]
    assert batches_sent([(0.001, "touch"), (0.0015, "touch_soon")], 0.001) == [(0.002, b"uu")]


def test_within_a_host_deferrable_updates_wait_four_intervals_at_most() -> None:
    assert batches_sent([(0.0, "touch_later"), (0.001, "touch")]) == [(0.006, b"u"), (LOCAL_LATER, b"r")]
    assert batches_sent([(0.0, "touch_later"), (0.012, "touch")]) == [(0.017, b"ur")]


def test_at_once_is_never_later_than_the_interval() -> None:
    gathered = Batch(lambda batch: None)
    gathered.pace(0.0005, PATIENCE)
    gathered._adapt(1, 0.0)
    assert gathered._interval == 0.0005
