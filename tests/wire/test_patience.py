"""The clock of the tests: the machine may be slow, and stand still."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from proxy.core.ports import SystemClock
from tests.helpers.http.support import Pod, Received, plain, post, rig
from tests.helpers.http.support import timeouts as after
from tests.helpers.patience import CLOCK, TURN, PatientLoop


def stand_still(seconds: float = 0.3) -> None:
    time.sleep(seconds)


async def test_computations_last_almost_no_time() -> None:
    assert isinstance(asyncio.get_running_loop(), PatientLoop)
    began, machines = SystemClock().now(), time.monotonic()
    stand_still()
    assert SystemClock().now() - began <= TURN
    assert time.monotonic() - machines >= 0.3


async def test_waits_last_their_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientLoop, "skips", False)
    loop = asyncio.get_running_loop()
    began, machines = loop.time(), time.monotonic()
    await asyncio.sleep(0.2)
    assert loop.time() - began >= 0.199
    assert time.monotonic() - machines >= 0.199


async def test_a_wait_without_other_events_is_skipped() -> None:
    loop = asyncio.get_running_loop()
    began, machines = loop.time(), time.monotonic()
    await asyncio.sleep(3600)
    assert loop.time() - began >= 3599.9
    assert time.monotonic() - machines < 3600


def test_a_thread_of_an_earlier_test_is_waited_for_only_by_a_loop_that_it_can_wake() -> None:
    """As the poller of gRPC, which runs from its first use to the end of the process."""
    stopped = threading.Event()
    thread = threading.Thread(target=stopped.wait)
    thread.start()
    loop, (reads, writes) = PatientLoop(), socket.socketpair()
    try:
        assert loop.may_skip()
        loop.add_reader(reads, lambda: None)
        assert not loop.may_skip()
        loop.remove_reader(reads)
        assert loop.may_skip()
    finally:
        stopped.set()
        thread.join()
        loop.close()
        reads.close()
        writes.close()


async def test_work_in_a_thread_is_waited_for() -> None:
    async with asyncio.timeout(60):
        await asyncio.to_thread(time.sleep, 0.2)


async def test_a_thread_that_may_call_back_is_waited_for() -> None:
    loop, called = asyncio.get_running_loop(), asyncio.Event()

    def call_back() -> None:
        stand_still()
        loop.call_soon_threadsafe(called.set)

    caller = threading.Thread(target=call_back)
    caller.start()
    async with asyncio.timeout(60):
        await called.wait()
    caller.join()


async def test_the_clock_of_the_proxy_is_the_loops() -> None:
    for _ in range(3):
        before, now = SystemClock().now(), asyncio.get_running_loop().time()
        assert before <= now <= SystemClock().now()
        stand_still(0.01)
        await asyncio.sleep(0.01)


async def test_no_timeout_precedes_bytes_in_transit() -> None:
    async def script(request: Received) -> None:
        stand_still()
        await request.send(plain())

    async with Pod(script) as pod, rig(pod, timeouts=after(connect=0.1, first_byte=0.1, request=0.1)) as port:
        assert (await port.ask(post())).status == 200


async def test_a_too_long_wait_is_reported() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()


async def test_a_process_can_be_suspended() -> None:
    began = SystemClock().now()
    CLOCK.stand_still(5.0)
    assert SystemClock().now() - began >= 5.0
