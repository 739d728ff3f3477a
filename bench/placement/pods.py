"""A simulated pod on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from bench.placement.engine import Counted, CountingEngine
from bench.placement.prompts import parts
from bench.placement.workload import Job
from proxy.sim import SimConfig


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


class VirtualPod:
    """An engine that may die, and come back with nothing in its memory."""

    def __init__(self, index: int, config: SimConfig) -> None:
        self.index = index
        self.config = config
        self.engine = CountingEngine(config)
        self.started_at = 0.0
        self.up = True

    @property
    def in_flight(self) -> int:
        return len(self.engine.running) + len(self.engine.waiting)

    def submit(self, index: int, job: Job, now: float) -> Counted:
        sequence = Counted(index, job.prompt_tokens, job.output_tokens, parts(job, self.config.block_size))
        self.engine.submit(sequence, now)
        return sequence

    def go_down(self) -> None:
        """What ran is lost."""
        self.engine = CountingEngine(self.config)
        self.up = False

    def come_up(self, now: float) -> None:
        self.up = True
        self.started_at = now

    def read(self, now: float) -> Reading:
        engine = self.engine
        return Reading(
            len(engine.waiting),
            len(engine.running),
            engine.kv_usage(now),
            self.config.block_size,
            self.config.num_gpu_blocks,
            engine.queried_tokens,
            engine.hit_tokens,
            self.started_at,
        )
