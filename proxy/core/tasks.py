"""Background tasks with an owner: no task outlives its owner, and an endless one is restarted when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from proxy.core.ports import Timer

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a failed endless task is restarted; each pause is twice the one before."""

SAME_ERROR_LOGGED_EVERY = 60.0
"""Seconds between two tracebacks of a kept task that fails with the same error."""

failures: Counter[str] = Counter()
"""Failures of all kept tasks of the process, by the kind of the task. Shown in kvlane_task_failures_total."""


class SystemTimer(Timer):
    """The timers of the running event loop."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)


class Tasks:
    """Holds its tasks until they end; leaving the `async with` cancels and awaits the rest."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task that ends. An error is logged. Endless work is started with `keep`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], kind: str, of: str = "") -> asyncio.Task[Any]:
        """Run `work` until it returns, and restart it with a growing pause whenever it raises. `kind` is the label of
        the metric; `of` distinguishes tasks of one kind, such as the name of a pod."""
        failures.setdefault(kind, 0)
        name = f"{kind} of {of}" if of else kind
        return self.start(_kept(work, kind, name), name)

    def __bool__(self) -> bool:
        """Return whether any task is running."""
        return bool(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("task %s failed", task.get_name(), exc_info=error)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def run_together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines at once and return their results. At the first error, cancel the others and raise that error.

    Used instead of `asyncio.TaskGroup`: after a failure in one, Python 3.11.2 (Debian 12) leaves the surrounding task
    with a pending cancellation, and each later `asyncio.timeout` of that task raises CancelledError, not TimeoutError.
    """
    running = [asyncio.get_running_loop().create_task(each) for each in work]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _kept(work: Callable[[], Coroutine[Any, Any, None]], kind: str, name: str) -> None:
    now = asyncio.get_running_loop().time
    pause, logged, logged_at = FIRST_PAUSE, "", 0.0
    while True:
        began = now()
        try:
            return await work()
        except Exception as error:
            failures[kind] += 1
            if now() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            if repr(error) != logged or now() - logged_at >= SAME_ERROR_LOGGED_EVERY:
                logged, logged_at = repr(error), now()
                log.error("task %s failed; restarting it in %.1f s", name, pause, exc_info=error)
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE, 2 * pause)
