"""Simulated pods on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.core.attempt import Stage
from proxy.lab.engine import Counted, CountingEngine
from proxy.lab.prompts import parts, parts_with_answer
from proxy.lab.sim import SimConfig
from proxy.lab.workload import Job


@dataclass(frozen=True, slots=True)
class Reading:
    """What a scrape of the pod says."""

    waiting: int
    running: int
    kv_usage: float
    block_size: int
    blocks: int
    queried_tokens: int
    hit_tokens: int
    started_at: float


class Submitted(Protocol):
    """A request in an engine: prompt tokens it found `cached`, and how often it was pre-empted."""

    @property
    def index(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def preemptions(self) -> int: ...


class Event(Protocol):
    """A request has its first token, or its last, or both; or its prompt came from another pod."""

    @property
    def sequence(self) -> Submitted: ...
    @property
    def first(self) -> bool: ...
    @property
    def last(self) -> bool: ...
    @property
    def came(self) -> bool: ...


class Engine(Protocol):
    """`CountingEngine` says what its members mean."""

    @property
    def until(self) -> float: ...
    @property
    def busy(self) -> bool: ...
    def finish(self) -> Sequence[Event]: ...
    def kv_usage(self, now: float) -> float: ...


class Pod(Protocol):
    """What a simulation makes of one."""

    @property
    def index(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def engine(self) -> Engine:
        """Another one after a restart."""

    @property
    def in_flight(self) -> int: ...
    def submit(self, index: int, job: Job, now: float, stage: Stage = Stage.WHOLE) -> Submitted: ...
    def let_go(self, index: int, now: float) -> None:
        """The prompt of this request, if it is kept for another pod: it was fetched, or nobody will."""

    def read(self, now: float) -> Reading: ...
    def go_down(self) -> None:
        """What ran is lost."""

    def come_up(self, now: float) -> None: ...


class Kept:
    """The prompts that a pod computes for others, by request. Lives as long as the pod's memory."""

    def __init__(self) -> None:
        self._sequences: dict[int, Counted] = {}

    def sequence(self, index: int, job: Job, block_size: int, stage: Stage) -> Counted:
        """What an engine is given to do."""
        named = parts(job, block_size)
        if stage is Stage.PREFILL:
            kept = self._sequences[index] = Counted(index, job.prompt_tokens, 1, named, stays=True)
            return kept
        grown, comes = parts_with_answer(job, block_size), stage is Stage.DECODE
        return Counted(index, job.prompt_tokens, job.output_tokens, named, grown, comes=comes)

    def taken(self, index: int) -> Counted | None:
        return self._sequences.pop(index, None)


class VirtualPod(Pod):
    """An engine that may die, and come back with nothing in its memory."""

    def __init__(self, index: int, config: SimConfig) -> None:
        self._index = index
        self._config = config
        self._engine = CountingEngine(config)
        self._kept = Kept()
        self._started_at = 0.0
        self._up = True

    @property
    def index(self) -> int:
        return self._index

    @property
    def up(self) -> bool:
        return self._up

    @property
    def engine(self) -> CountingEngine:
        return self._engine

    @property
    def in_flight(self) -> int:
        return len(self._engine.running) + len(self._engine.waiting) + self._engine.fetching

    def submit(self, index: int, job: Job, now: float, stage: Stage = Stage.WHOLE) -> Counted:
        sequence = self._kept.sequence(index, job, self._config.block_size, stage)
        self._engine.submit(sequence, now)
        return sequence

    def let_go(self, index: int, now: float) -> None:
        if sequence := self._kept.taken(index):
            self._engine.let_go(sequence, now)

    def read(self, now: float) -> Reading:
        engine = self._engine
        return Reading(
            len(engine.waiting) + engine.fetching,
            len(engine.running),
            engine.kv_usage(now),
            self._config.block_size,
            self._config.num_gpu_blocks,
            engine.queried_tokens,
            engine.hit_tokens,
            self._started_at,
        )

    def go_down(self) -> None:
        self._engine = CountingEngine(self._config)
        self._kept = Kept()
        self._up = False

    def come_up(self, now: float) -> None:
        self._up = True
        self._started_at = now
