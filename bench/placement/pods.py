"""A simulated pod on a virtual clock."""

from __future__ import annotations

from bench.placement.engines import VLLM, Model
from proxy.core.attempt import Stage
from proxy.lab.engine import Counted
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import Kept, Reading
from proxy.lab.workload import Job

__all__ = ["Reading", "VirtualPod"]


class VirtualPod:
    """An engine that may die, and come back with nothing in its memory."""

    def __init__(self, index: int, config: SimConfig, model: Model = VLLM) -> None:
        self.index = index
        self.config = config
        self.engine = model.make(config)
        self.started_at = 0.0
        self.up = True
        self._model = model
        self._kept = Kept()

    @property
    def in_flight(self) -> int:
        return len(self.engine.running) + len(self.engine.waiting) + self.engine.fetching

    @property
    def is_sated(self) -> bool:
        """It has all the work that it can do at a time."""
        return bool(self._model.is_sated(self.engine))

    def submit(self, index: int, job: Job, now: float, stage: Stage = Stage.WHOLE) -> Counted:
        sequence = self._kept.sequence(index, job, self.config.block_size, stage)
        self.engine.submit(sequence, now)
        return sequence

    def let_go(self, index: int, now: float) -> None:
        if sequence := self._kept.taken(index):
            self.engine.let_go(sequence, now)

    def foresee(self, newcomer: Counted, now: float, before: float) -> tuple[float, int]:
        """When a request that came now would have its first token, infinite if not `before` some time; and how many of
        its tokens it would find."""
        return self._model.foresee(self.engine, newcomer, now, before)

    def go_down(self) -> None:
        """What ran is lost."""
        self.engine = self._model.make(self.config)
        self._kept = Kept()
        self.up = False

    def come_up(self, now: float) -> None:
        self.up = True
        self.started_at = now

    def read(self, now: float) -> Reading:
        engine = self.engine
        return Reading(
            len(engine.waiting) + engine.fetching,
            len(engine.running),
            engine.kv_usage(now),
            self.config.block_size,
            self.config.num_gpu_blocks,
            engine.queried_tokens,
            engine.hit_tokens,
            self.started_at,
        )
