"""Runs an engine on the event loop: sleeps for each step and hands each token to its listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from proxy.lab.sim.engine import Engine
from proxy.lab.sim.sequence import Output, Sequence

MOST_LAG = 0.05
"""Seconds a late engine catches up; on a host that is too slow it falls behind instead of racing later."""


class EngineDriver:
    """The engine on the clock `now` (seconds, monotonic). `run` is its loop; it ends by being cancelled."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self.engine = engine
        self.now = now
        self._work = asyncio.Event()
        self._frozen_until = 0.0
        self._slow_until = 0.0
        self._slowness = (1.0, 1.0)
        """How many times longer its steps take at first, and for how many seconds it recovers."""

    def submit(self, sequences: Iterable[Sequence]) -> None:
        now = self.now()
        for sequence in sequences:
            self.engine.submit(sequence, now)
        self._work.set()

    def abort(self, sequences: Iterable[Sequence]) -> None:
        now = self.now()
        for sequence in sequences:
            self.engine.abort(sequence, now)
        self._work.set()

    def loaded(self, sequence: Sequence, *, cached: bool) -> None:
        self.engine.loaded(sequence, cached=cached)
        self._work.set()

    def give_back(self, sequence: Sequence) -> None:
        self.engine.give_back(sequence)
        self._work.set()

    def fail(self, sequence: Sequence) -> None:
        self._tell(self.engine.fail(sequence, self.now()))
        self._work.set()

    def fail_all(self) -> None:
        self._tell(self.engine.fail_all(self.now()))

    def freeze(self, seconds: float) -> None:
        """No step ends before."""
        self._frozen_until = max(self._frozen_until, self.now() + seconds)

    def slow_down(self, factor: float, seconds: float) -> None:
        """Steps take `factor` times as long, less by and by, until the seconds have passed."""
        self._slowness, self._slow_until = (factor, seconds), self.now() + seconds

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
            if not step.chunks:  # what waits needs blocks that are kept for other pods, or are being loaded
                return
            due = max(due, now - MOST_LAG) + step.duration * self._slowed(now) / self.engine.config.time_scale
            await asyncio.sleep(max(0.0, due - now))
            await self._thaw()
            self._tell(self.engine.finish_step(step, self.now()))

    def _tell(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            output.sequence.listener(output)

    async def _thaw(self) -> None:
        while True:
            seconds = self._frozen_until - self.now()
            if seconds <= 0.0:
                return
            await asyncio.sleep(seconds)

    def _slowed(self, now: float) -> float:
        if now >= self._slow_until:
            return 1.0
        factor, seconds = self._slowness
        return 1.0 + (factor - 1.0) * (self._slow_until - now) / seconds
