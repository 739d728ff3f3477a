"""Runs an engine on the event loop: sleeps for each step and hands each token to its listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from proxy.sim.engine import Engine
from proxy.sim.sequence import Sequence

MOST_LAG = 0.05
"""Seconds a late engine catches up; on a host that is too slow it falls behind instead of racing later."""


class EngineDriver:
    """The engine on the clock `now` (seconds, monotonic). `run` is its loop; it ends by being cancelled."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self.engine = engine
        self.now = now
        self._work = asyncio.Event()

    def submit(self, sequences: Iterable[Sequence]) -> None:
        now = self.now()
        for sequence in sequences:
            self.engine.submit(sequence, now)
        self._work.set()

    def abort(self, sequences: Iterable[Sequence]) -> None:
        now = self.now()
        for sequence in sequences:
            self.engine.abort(sequence, now)

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._step_while_busy()

    async def _step_while_busy(self) -> None:
        due = self.now()
        while self.engine.busy:
            now = self.now()
            step = self.engine.begin_step(now)
            due = max(due, now - MOST_LAG) + step.duration / self.engine.config.time_scale
            await asyncio.sleep(max(0.0, due - now))
            for output in self.engine.finish_step(step, self.now()):
                output.sequence.listener(output)
