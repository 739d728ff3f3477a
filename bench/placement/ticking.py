"""A third model of an engine: the scheduler of AIPerf's mock server (`--scheduler-enabled`; README.md and scheduler.py
in tests/aiperf_mock_server of github.com/ai-dynamo/aiperf), in its prefill-bound setting.

A pod ticks, whatever it has to do. Prompts are cut into chunks; in a tick as many prompts as there are places for
chunks compute one each, those at the head of a line, and who is not done goes to its end: prompts share the pod, each
in turn for one chunk, and a short one overtakes a long one. The first token comes with the last chunk. In each tick who
has his first token gets another one, up to as many as the batch has room for.

Three things differ from the original: prompts are cached, which it does not know, as in `foreign`; a request that finds
too few free blocks waits; and where more decode than the batch has room for, all become slower by their share, where
that one lets them take turns.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from bench.placement.prompt_cache import CachingEngine
from proxy.lab.engine import CountedRequest, EngineEvent
from proxy.lab.sim import SimConfig

ROUNDING = 1e-6
"""Ticks: so much too little is a whole one."""


@dataclass(frozen=True, slots=True)
class TickTiming:
    """Seconds, sequences, chunks and tokens. The step and the batch are the original's defaults, the chunks the
    values of its recipe for a pod that prompts keep busy."""

    step: float = 0.005
    batch: int = 256
    chunks: int = 1
    chunk_tokens: int = 256

    def chunks_of(self, tokens: int) -> int:
        return max(1, -(-tokens // self.chunk_tokens))


class PromptLine:
    """Prompts that are computed a chunk at a time."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self.prompts: deque[tuple[CountedRequest, int]] = deque()
        """(sequence, chunks left), as they take turns."""

    def copy(self) -> PromptLine:
        other = PromptLine(self._chunks)
        other.prompts = deque(self.prompts)
        return other

    @property
    def at_a_time(self) -> int:
        return min(self._chunks, len(self.prompts))

    @property
    def due(self) -> float:
        """Ticks until one of them is done."""
        many, at_a_time = len(self.prompts), self.at_a_time
        turns = (at + (left - 1) * many for at, (_, left) in enumerate(self.prompts))
        return min((turn // at_a_time + 1 for turn in turns), default=math.inf)

    def tick(self, times: int) -> list[CountedRequest]:
        """Not beyond `due`; returns who is done."""
        if not self.prompts:
            return []
        rounds, more = divmod(times * self.at_a_time, len(self.prompts))
        left = [(one, left - rounds - (at < more)) for at, (one, left) in enumerate(self.prompts)]
        left = left[more:] + left[:more]
        self.prompts = deque(each for each in left if each[1] > 0)
        return [one for one, chunks in left if chunks <= 0]


class TickingEngine(CachingEngine):
    def __init__(self, config: SimConfig, timing: TickTiming | None = None) -> None:
        super().__init__(config)
        self.timing = timing or TickTiming()
        self._line = PromptLine(self.timing.chunks)
        self._blocked: deque[CountedRequest] = deque()
        self._decoding: list[tuple[float, int, CountedRequest]] = []
        """A heap of (`_said` at its last token, order, sequence)."""
        self._reported = 0.0
        """Tokens of one who had decoded from the beginning."""
        self._order = 0
        self._ticked_at = 0.0
        self._tick = self.timing.step * config.slowdown

    @property
    def busy(self) -> bool:
        return bool(self._blocked or self._line.prompts or self._decoding)

    @property
    def waiting(self) -> deque[CountedRequest]:
        """Those for whom there is no room."""
        return self._blocked

    @property
    def running(self) -> list[CountedRequest]:
        return [*(one for one, _ in self._line.prompts), *(one for _, _, one in self._decoding)]

    @property
    def is_sated(self) -> bool:
        """One prompt more would not be computed sooner."""
        return len(self._line.prompts) > self.timing.chunks

    def submit(self, sequence: CountedRequest, now: float) -> None:
        if not self.busy:
            self._ticked_at = now
        due = self._due
        passed = (now - self._ticked_at) / self._tick + ROUNDING
        self._pass(min(int(passed), due - 1) if due < math.inf else int(passed))
        self._blocked.append(sequence)
        self._admit()

    def finish(self) -> list[EngineEvent]:
        events = []
        for sequence in self._pass(int(self._due)):
            if sequence.max_tokens > 1:
                self._order += 1
                heappush(self._decoding, (self._reported + sequence.max_tokens - 1, self._order, sequence))
            events.append(EngineEvent(sequence, True, sequence.max_tokens <= 1))
        while self._decoding and self._decoding[0][0] <= self._reported + ROUNDING:
            events.append(EngineEvent(heappop(self._decoding)[2], False, True))
        for event in events:
            if event.last:
                self.cache.release(event.sequence)
        self._admit()
        return events

    def foresee(self, newcomer: CountedRequest, now: float) -> tuple[float, int]:
        """When it would have its first token, and the tokens of it that would be cached. What is evicted meanwhile, and
        that blocks may be short, is not foreseen."""
        line, came = self._line.copy(), dict[int, int]()
        passed = int((now - self._ticked_at) / self._tick + ROUNDING) if self.busy else 0
        line.tick(int(min(passed, line.due - 1)))
        at = self._ticked_at + passed * self._tick if self.busy else now
        for sequence in (*self._blocked, newcomer):
            cached = self.cache.foreseen(sequence, came)
            line.prompts.append((sequence, self.timing.chunks_of(sequence.prompt - cached)))
            came.update(sequence.parts)
        while True:
            ticks = int(line.due)
            at += ticks * self._tick
            if newcomer in line.tick(ticks):
                return at, cached

    @property
    def _due(self) -> float:
        """Ticks until the next first or last token."""
        due = self._line.due
        if self._decoding:
            due = min(due, max(1, math.ceil((self._decoding[0][0] - self._reported) / self._tokens - ROUNDING)))
        return due

    @property
    def _tokens(self) -> float:
        """Tokens of a response in a tick."""
        return min(1.0, self.timing.batch / len(self._decoding)) if self._decoding else 0.0

    def _pass(self, ticks: float) -> list[CountedRequest]:
        """Whose prompts are done by then."""
        self._reported += ticks * self._tokens
        self._ticked_at += ticks * self._tick
        return self._line.tick(int(ticks))

    def _admit(self) -> None:
        while self._blocked and self.cache.fits(self._blocked[0]):
            sequence = self._blocked.popleft()
            self.cache.start(sequence)
            self._line.prompts.append((sequence, self.timing.chunks_of(sequence.prompt - sequence.cached)))
        if self._blocked and not (self._line.prompts or self._decoding):
            raise RuntimeError("a request needs more blocks than the pod has")
        self._tick = self.timing.step * self._pace.factor()
        self.until = self._ticked_at + self._due * self._tick
