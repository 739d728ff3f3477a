"""Tuning of Python's garbage collector: no full collection while requests are in flight, unless memory requires it."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from proxy.core.tasks import Tasks

INTERVAL = 1.0
"""Seconds between two readings of the memory; one takes 20 us."""

GROWTH = 0.5
"""Share by which memory must grow after the last full collection before the next one; half of this share is enough
while no request is in flight."""

LEAST_GROWTH = 64 << 20
"""Smallest growth in bytes that triggers a full collection; it applies to small processes."""

YOUNG = 5000
"""Number of new objects after which young objects are collected. A request leaves a dozen objects until it is counted:
at the threshold of 700 of Python 3.11 nearly all of them would be scanned, twice, which costs 1.5 % of a request."""

NEVER = 1 << 30


class Collector:
    """`async with Collector(idle)`, for a process as a whole: enter it when all is imported and constructed.

    A full collection stops the process: for 20 to 50 ms after start-up, and for up to 0.2 us more per object since; the
    prefix index can have 600,000. Python starts one whenever the tracked objects have grown by a quarter, and finds
    nothing: requests leave no cycles. So the objects of the start are frozen, young objects are collected as usual (a
    millisecond at most), and a full collection waits until memory has grown and no request is in flight. Reference
    cycles of a plugin cost half of the memory at most, or LEAST_GROWTH.

    Python 3.14.0 to 3.14.4 ignore the threshold set here: they do full collections in small steps by themselves.
    """

    def __init__(self, idle: Callable[[], bool] = lambda: True, memory: Callable[[], int] | None = None) -> None:
        """`memory` returns the bytes of the process whose growth cycles may cause; by default all of its memory."""
        self._idle = idle
        self._memory = memory or resident
        self._after_last = 0
        self._tasks = Tasks()

    async def __aenter__(self) -> Collector:
        self._thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, self._thresholds[1], NEVER)
        self._after_last = self._memory()
        self._tasks.keep(self._run, "garbage-collection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)

    def check(self) -> bool:
        """Do a full collection if there is reason for it. Return whether it was done."""
        growth, limit = self._memory() - self._after_last, max(self._after_last * GROWTH, LEAST_GROWTH)
        collects = growth > limit or (growth > limit / 2 and self._idle())
        if collects:
            gc.collect()
            self._after_last = self._memory()
        return collects

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self.check()


def resident() -> int:
    """Return the resident memory of the process in bytes; its peak where the system does not report the current
    value."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_STATM = Path("/proc/self/statm")
