"""Data-parallel ranks on the virtual clock that step together, as the ranks of a mixture-of-experts model do."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from proxy.lab.engine import CountingEngine, EngineEvent
from proxy.lab.sim import SimConfig


class RankEngine(CountingEngine):
    """A counting engine that a `LockstepGroup` may pace."""

    def __init__(self, config: SimConfig) -> None:
        super().__init__(config)
        self.group: LockstepGroup | None = None

    def _adapt(self, now: float, *, is_first: bool) -> None:
        if self.group is None:
            super()._adapt(now, is_first=is_first)
        else:
            self.group.adapt(now, is_first=is_first)


class LockstepGroup:
    """The engines of a pod's data-parallel ranks, which step together: each step takes as long as on the slowest rank.
    `until` and `finish` have the same meaning as for one engine. Prompts cannot come from other pods."""

    def __init__(self, engines: Sequence[RankEngine]) -> None:
        self.until = math.inf
        self._engines = list(engines)
        self._ends: list[float] = []
        self._stepping: list[RankEngine] = []
        """The engines with work in the current steps."""
        for engine in engines:
            engine.group = self

    def adapt(self, now: float, *, is_first: bool) -> None:
        """Let a rank with new work join: at once if no rank steps, or after the current step if the work `is_first` in
        its queue."""
        if not self._ends:
            self._plan(now)
        elif is_first and len(self._ends) > 1:
            kept = bisect_left(self._ends, now) + 1
            self._set_ends(self._ends[:kept])

    def finish(self) -> list[EngineEvent]:
        now = self.until
        events = [event for engine in self._engines for event in engine.end_steps(now)]
        self._plan(now)
        return events

    def _plan(self, now: float) -> None:
        steps = [engine.start_steps(now) for engine in self._engines]
        count = min((each for each in steps if each), default=0)
        self._stepping = [engine for engine, each in zip(self._engines, steps, strict=True) if each]
        if not count:
            self._ends, self.until = [], math.inf
            return
        slowest = map(max, zip(*(engine.durations(count) for engine in self._stepping), strict=True))
        self._set_ends(list(accumulate(slowest, initial=now))[1:])

    def _set_ends(self, ends: list[float]) -> None:
        self._ends, self.until = ends, ends[-1]
        for engine in self._stepping:
            engine.ends, engine.until = ends, self.until
