"""Another model of an engine, so that what holds here does not hold for one simulator only: the timing of
llm-d-inference-sim (docs/latency-simulation.md of github.com/llm-d/llm-d-inference-sim, calculator `per-token`).

There are no steps and no batches. A request that runs is computed in a time that is fixed when it starts,

    (overhead + uncached prompt tokens * per_token) * load
    load = 1 + (under_load - 1) * (running - 1) / (most - 1)

with a normal deviation, kept within 70 % of the mean; then it says a token every `between_tokens * load` seconds.
Requests beyond `most` wait in line. The KV cache holds whole blocks of prompts, found by others from the moment the
request starts, and evicts the least recently used ones.

Two things differ from the original: a request that finds too few free blocks waits, where the original responds with an
error; and the time between tokens does not deviate, which cancels out over a complete response.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from bench.placement.prompt_cache import CachingEngine
from proxy.lab.engine import CountedRequest, EngineEvent
from proxy.lab.sim import SimConfig

FARTHEST = 0.7
"""The most that a time deviates, as a share of its mean."""


@dataclass(frozen=True, slots=True)
class ForeignTiming:
    """Seconds; the defaults are the original's profile of an 8B model on an H100 (8b-h100-balanced-per-token.yaml)."""

    overhead: float = 0.030
    per_token: float = 0.000_25
    deviation: float = 0.005
    between_tokens: float = 0.012
    under_load: float = 2.0
    most: int = 16

    def load(self, running: int) -> float:
        return 1.0 if self.most <= 1 else 1 + (self.under_load - 1) * (running - 1) / (self.most - 1)

    def prefill(self, uncached: int, running: int) -> float:
        return (self.overhead + uncached * self.per_token) * self.load(running)


class Course:
    """The sequences that run at `at`, and their progress while no other joins.

    All decode at the same speed, so one count of tokens serves all: `reported` is the output of a sequence that had
    decoded from the beginning."""

    def __init__(self, timing: ForeignTiming, slowdown: float) -> None:
        self.timing = timing
        self.slowdown = slowdown
        self.at = 0.0
        self.reported = 0.0
        self.prefilling: list[tuple[float, int, CountedRequest]] = []
        """A heap of (time of the first token, order, sequence)."""
        self.decoding: list[tuple[float, int, CountedRequest]] = []
        """A heap of (`said` at its last token, order, sequence)."""
        self._order = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def until(self) -> float:
        """When the next first or last token comes."""
        soonest = self.prefilling[0][0] if self.prefilling else math.inf
        if self.decoding:
            soonest = min(soonest, self.at + max(0.0, self.decoding[0][0] - self.reported) * self._token())
        return soonest

    def copy(self) -> Course:
        other = Course(self.timing, self.slowdown)
        other.at, other.reported, other._order = self.at, self.reported, self._order
        other.prefilling, other.decoding = list(self.prefilling), list(self.decoding)
        return other

    def pass_to(self, now: float) -> None:
        """No token that `until` speaks of comes before."""
        if self.decoding:
            self.reported += (now - self.at) / self._token()
        self.at = now

    def start(self, sequence: CountedRequest, first_token: float) -> None:
        self._order += 1
        heappush(self.prefilling, (first_token, self._order, sequence))

    def pop(self) -> EngineEvent:
        """The token that comes at `until`, which has been passed to."""
        if self.prefilling and self.prefilling[0][0] <= self.at:
            _, order, sequence = heappop(self.prefilling)
            if sequence.max_tokens > 1:
                heappush(self.decoding, (self.reported + sequence.max_tokens - 1, order, sequence))
            return EngineEvent(sequence, True, sequence.max_tokens <= 1)
        return EngineEvent(heappop(self.decoding)[2], False, True)

    def _token(self) -> float:
        return self.timing.between_tokens * self.timing.load(self.running) * self.slowdown


class ForeignEngine(CachingEngine):
    def __init__(self, config: SimConfig, timing: ForeignTiming | None = None) -> None:
        super().__init__(config)
        self.timing = timing or ForeignTiming()
        self.waiting: deque[CountedRequest] = deque()
        self.running: list[CountedRequest] = []
        self._course = Course(self.timing, config.slowdown)
        self._rng = Random(config.noise_seed)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, sequence: CountedRequest, now: float) -> None:
        self.waiting.append(sequence)
        self._course.pass_to(now)
        self._admit()

    def finish(self) -> list[EngineEvent]:
        self._course.pass_to(self.until)
        event = self._course.pop()
        if event.last:
            self.running.remove(event.sequence)
            self.cache.release(event.sequence)
        self._admit()
        return [event]

    def foresee(self, newcomer: CountedRequest, now: float) -> tuple[float, int]:
        """When it would have its first token, and the tokens of it that would be cached. What is evicted meanwhile, and
        that blocks may be short, is not foreseen."""
        course, queue = self._course.copy(), [*self.waiting, newcomer]
        course.pass_to(now)
        came: dict[int, int] = {}
        while True:
            while queue and course.running < self.timing.most:
                sequence = queue.pop(0)
                cached = self.cache.foreseen(sequence, came)
                took = self.timing.prefill(sequence.prompt - cached, course.running + 1) * course.slowdown
                if sequence is newcomer:
                    return course.at + took, cached
                course.start(sequence, course.at + took)
                came.update(sequence.parts)
            course.pass_to(course.until)
            course.pop()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.timing.most and self.cache.fits(self.waiting[0]):
            self._start(self.waiting.popleft())
        if self.waiting and not self.running:
            raise RuntimeError("a request needs more blocks than the pod has")
        self.until = self._course.until

    def _start(self, sequence: CountedRequest) -> None:
        self.cache.start(sequence)
        self.running.append(sequence)
        mean = self.timing.prefill(sequence.prompt - sequence.cached, len(self.running))
        took = min(max(self._rng.gauss(mean, self.timing.deviation), mean * (1 - FARTHEST)), mean * (1 + FARTHEST))
        self._course.start(sequence, self._course.at + took * self._pace.factor())
