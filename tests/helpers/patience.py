"""The clock and the event loop of tests: computing takes next to no time, and waiting takes all of it.

Pods, proxy and clients of a test share one loop, so no time limit passes only because the machine is busy. Where
nothing outside the loop can wake it (`skips_waits`), the clock skips to the next timer instead of waiting: a sleep in
such a test costs no time."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import pytest

from proxy.core.ports import SystemClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURN = 0.001
"""Seconds that the clock advances at most during one turn of a loop."""

SPEED = 50
LEAST, MOST = 0.001, 0.05
"""Where waits are skipped, a wait takes a part of its time, between these limits in seconds: the kernel needs it to
deliver what was sent. TCP may hold a small packet back for 40 ms."""


class PatientClock:
    """The machine's monotonic clock without the time beyond an allowance. All loops of the process share it."""

    def __init__(self) -> None:
        self._phase = (time.monotonic(), time.monotonic(), float("inf"))
        """The start of the phase by this clock and by the machine's, and the seconds that it lasts at most."""

    def now(self) -> float:
        ours, machines, allowance = self._phase
        return ours + min(time.monotonic() - machines, allowance)

    def allow(self, seconds: float) -> None:
        """Advance by at most so many seconds from now on."""
        self._phase = (self.now(), time.monotonic(), seconds)

    def stand_still(self, seconds: float) -> None:
        """Advance as if the process had no CPU for so many seconds."""
        ours, machines, allowance = self._phase
        self._phase = (ours + seconds, machines, allowance)


CLOCK = PatientClock()


class PatientLoop(asyncio.SelectorEventLoop):
    skips: bool = False
    """Whether loops skip waits."""

    def __init__(self) -> None:
        self._in_threads: set[asyncio.Future[Any]] = set()
        self._has_programs = False
        self._of_earlier_tests = set(threading.enumerate())
        self._read_for_others: set[Any] = set()
        super().__init__(_Selector(self.may_skip))

    def time(self) -> float:
        return CLOCK.now()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return future

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        self._has_programs = True
        return await super().subprocess_exec(*args, **options)

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        self._read_for_others.add(fd)
        super().add_reader(fd, callback, *args)

    def remove_reader(self, fd: Any) -> bool:
        self._read_for_others.discard(fd)
        return super().remove_reader(fd)

    def may_skip(self) -> bool:
        """Return whether only timers and sockets of this loop can wake it: no other thread and no program works for
        it. A thread of an earlier test works for no loop that has been made since, unless the loop reads what it
        writes: the poller of gRPC wakes all loops that use gRPC."""
        if not PatientLoop.skips or self._has_programs or self._in_threads:
            return False
        threads = set(threading.enumerate())
        return not any(map(_may_wake, threads if self._read_for_others else threads - self._of_earlier_tests))

    def run_forever(self) -> None:
        CLOCK.allow(TURN)
        try:
            super().run_forever()
        finally:
            CLOCK.allow(float("inf"))


@pytest.fixture(autouse=True)
def skips_waits() -> Iterator[None]:
    """Skip waits while every party waits; for tests that start no programs."""
    PatientLoop.skips = True
    yield
    PatientLoop.skips = False


def _may_wake(thread: threading.Thread) -> bool:
    """Return whether the thread may wake the loop. Work of executors is counted; threads that write lines never wake
    the loop; dummies belong to the test runner."""
    return not (
        thread is threading.main_thread()
        or thread.name.startswith(("asyncio_", "ThreadPoolExecutor", "the access log", "the record"))
        or isinstance(thread, threading._DummyThread)
    )


class _Selector(selectors.DefaultSelector):
    def __init__(self, may_skip: Callable[[], bool]) -> None:
        super().__init__()
        self._may_skip = may_skip

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= LEAST or not self._may_skip():
            return self._select(timeout)
        has_connections = len(self.get_map()) > 1  # the loop itself reads a socket that wakes it
        grace = min(max(LEAST, timeout / SPEED), MOST) if has_connections else 0.0
        ready = self._select(grace)
        if not ready:
            CLOCK.stand_still(timeout - grace)
        return ready

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        CLOCK.allow(float("inf") if timeout is None else timeout)
        try:
            return super().select(timeout)
        finally:
            CLOCK.allow(TURN)


def install() -> None:
    """Make the clock of the program agree with the clock of the loops."""
    SystemClock.now = staticmethod(CLOCK.now)


def loops() -> Mapping[str, Any]:
    """Return the loops for pytest-asyncio."""
    return {"patient": PatientLoop}
