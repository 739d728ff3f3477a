"""Time as the tests have it: what a slow machine takes to compute is next to nothing, what is waited for is all of it.

Pods, proxy and clients of a test share one loop, so no time-out comes before an answer that is merely late because the
machine was busy, or stood still."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Mapping
from typing import Any

from proxy.core.clock import SystemClock

TURN = 0.001
"""Seconds that one turn of a loop takes at most, however long it took."""


class PatientClock:
    """The machine's monotonic clock, less what goes beyond an allowance. Lives as long as the process does, and all its
    loops have it."""

    def __init__(self) -> None:
        self._phase = (time.monotonic(), time.monotonic(), float("inf"))
        """When it began, by this clock and by the machine's, and how long it lasts at most."""

    def now(self) -> float:
        ours, machines, allowance = self._phase
        return ours + min(time.monotonic() - machines, allowance)

    def allow(self, seconds: float) -> None:
        """From here on that much passes, at most."""
        self._phase = (self.now(), time.monotonic(), seconds)

    def stand_still(self, seconds: float) -> None:
        """So long this process gets no CPU, and the clock goes on."""
        ours, machines, allowance = self._phase
        self._phase = (ours + seconds, machines, allowance)


CLOCK = PatientClock()


class PatientLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_Selector())

    def time(self) -> float:
        return CLOCK.now()

    def run_forever(self) -> None:
        CLOCK.allow(TURN)
        try:
            super().run_forever()
        finally:
            CLOCK.allow(float("inf"))


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        CLOCK.allow(float("inf") if timeout is None else timeout)
        try:
            return super().select(timeout)
        finally:
            CLOCK.allow(TURN)


def install() -> None:
    """For what asks the machine's clock, too: it is to agree with the loop's."""
    SystemClock.now = staticmethod(CLOCK.now)


def loops() -> Mapping[str, Any]:
    """As pytest-asyncio wants them."""
    return {"patient": PatientLoop}
