"""The driver of the engines of a pod on the event loop: it sleeps for each step and passes each token to its
listener."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from datetime import UTC, datetime

from proxy.lab.sim.engine import EngineStep, SimEngine
from proxy.lab.sim.sequence import Output, Sequence

MOST_LAG = 0.05
"""Largest delay in seconds that an engine catches up with. On a host that is too slow, the engine falls behind
instead."""

COUNTS_INTERVAL = 0.1
"""Seconds between two reads of the queues by the internal balancer: the interval of vLLM's coordinator."""

WAITING_WEIGHT = 4
"""A waiting request counts as this many running requests, as in vLLM's `DPLBAsyncMPClient`."""


@dataclass(slots=True)
class InternalBalancer:
    """vLLM's choice of a data-parallel rank for a request without a rank: the rank with the lowest 4 * waiting +
    running, the first of several. It uses the queues of its last read, and counts each request that it has placed since
    then as waiting."""

    queues: Callable[[], Iterable[tuple[int, int]]]
    """Returns the numbers of waiting and running requests of each rank."""
    interval: float = COUNTS_INTERVAL
    _looked_at: float = -math.inf
    _scores: list[int] = field(default_factory=list)

    def choose(self, now: float) -> int:
        if now - self._looked_at >= self.interval:
            self._looked_at = now
            self._scores = [WAITING_WEIGHT * waiting + running for waiting, running in self.queues()]
        rank = self._scores.index(min(self._scores))
        self._scores[rank] += WAITING_WEIGHT
        return rank


class EngineDriver:
    """The engines of one pod, one for each data-parallel rank, on the clock of the event loop, `now`. `run` is their
    loop, which ends by cancellation. In lockstep all ranks step together, and the slowest rank determines the duration
    of the step: the experts of a mixture-of-experts model are distributed over all ranks. Otherwise each rank steps
    independently."""

    def __init__(self, engines: Items[SimEngine]) -> None:
        self.engines = engines
        self.now = asyncio.get_running_loop().time
        self._balancer = InternalBalancer(
            lambda: [(engine.waiting_requests, len(engine.running)) for engine in engines],
            COUNTS_INTERVAL / engines[0].config.time_scale,
        )
        groups = [engines] if engines[0].config.lockstep else [[engine] for engine in engines]
        self._groups = [(group, asyncio.Event()) for group in groups]
        """The engines that step together, and an event that is set when they may have work."""
        self._frozen_until = 0.0
        self._slow_until = 0.0
        self._slowness = (1.0, 1.0)
        """The initial factor on the duration of steps, and the seconds in which it falls to 1."""

    @staticmethod
    def wall() -> float:
        """Return seconds since the epoch."""
        return datetime.now(UTC).timestamp()

    def place(self, sequences: Iterable[Sequence], rank: int | None) -> None:
        """Assign each sequence to the rank that the request names, or to the internal balancer's choice."""
        for sequence in sequences:
            sequence.rank = self._balancer.choose(self.now()) if rank is None else rank

    def engine_of(self, sequence: Sequence) -> SimEngine:
        return self.engines[sequence.rank]

    def submit(self, sequences: Iterable[Sequence]) -> None:
        now = self.now()
        for sequence in sequences:
            self.engine_of(sequence).submit(sequence, now)
        self._wake()

    def abort(self, sequences: Iterable[Sequence]) -> None:
        now = self.now()
        for sequence in sequences:
            self.engine_of(sequence).abort(sequence, now)
        self._wake()

    def loaded(self, sequence: Sequence, *, cached: bool) -> None:
        self.engine_of(sequence).loaded(sequence, cached=cached)
        self._wake()

    def give_back(self, sequence: Sequence) -> None:
        self.engine_of(sequence).give_back(sequence)
        self._wake()

    def fail(self, sequence: Sequence) -> None:
        _notify(self.engine_of(sequence).fail(sequence, self.now()))
        self._wake()

    def fail_all(self) -> None:
        for engine in self.engines:
            _notify(engine.fail_all(self.now()))

    def forget_prefixes(self) -> None:
        for engine in self.engines:
            engine.forget_prefixes()

    def freeze(self, seconds: float) -> None:
        self._frozen_until = max(self._frozen_until, self.now() + seconds)

    def slow_down(self, factor: float, seconds: float) -> None:
        """Multiply the duration of steps by `factor`, which falls to 1 over this many seconds."""
        self._slowness, self._slow_until = (factor, seconds), self.now() + seconds

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # noqa: TID251  # this task has no timeouts
            for group, work in self._groups:
                tasks.create_task(self._run(group, work), name="steps of an engine")

    def _wake(self) -> None:
        for _, work in self._groups:
            work.set()

    async def _run(self, engines: Items[SimEngine], work: asyncio.Event) -> None:
        while True:
            await work.wait()
            work.clear()
            due = self.now()
            while steps := self._start_steps(engines):
                now = self.now()
                duration = max(step.duration for _, step in steps)
                due = max(due, now - MOST_LAG) + duration * self._slowed(now) / engines[0].config.time_scale
                await asyncio.sleep(max(0.0, due - now))
                await self._thaw()
                for engine, step in steps:
                    _notify(engine.finish_step(step, self.now()))
                    engine.publish_events(self.wall())

    def _start_steps(self, engines: Items[SimEngine]) -> list[tuple[SimEngine, EngineStep]]:
        """Start a step of each engine with work; none if all sequences wait for blocks or for other pods."""
        steps = [(engine, engine.start_step(self.now())) for engine in engines if engine.busy]
        return [(engine, step) for engine, step in steps if step.chunks]

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


def _notify(outputs: Iterable[Output]) -> None:
    for output in outputs:
        output.sequence.listener(output)
