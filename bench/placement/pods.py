"""A simulated pod on a virtual clock, whose engine can be foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.placement.engines import VLLM, Model
from bench.placement.lockstep import LockstepGroup
from proxy.lab import simulation
from proxy.lab.engine import CountedRequest
from proxy.lab.sim import SimConfig
from proxy.lab.sim.engine import SEEDS_APART

__all__ = ["VirtualPod", "virtual_fleet"]


class VirtualPod(simulation.VirtualPod):
    """Adds what the oracle and the measurement of the capacity need."""

    def __init__(
        self, index: int, config: SimConfig, model: Model = VLLM, *, pod: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(index, config, model.make, pod=pod, rank=rank)
        self._model = model
        self.lockstep: Lockstep | None = None

    @property
    def stepper(self) -> Any:
        return self.lockstep.group if self.lockstep else self.engine

    def go_down(self) -> None:
        super().go_down()
        if self.lockstep:
            self.lockstep.regroup()

    @property
    def is_sated(self) -> bool:
        """It has all the work that it can do at a time."""
        return bool(self._model.is_sated(self.engine))

    def foresee(self, newcomer: CountedRequest, now: float, before: float) -> tuple[float, int]:
        """When a request that came now would have its first token, infinite if not `before` some time; and how many of
        its tokens it would find."""
        return self._model.foresee(self.engine, newcomer, now, before)


class Lockstep:
    """The lockstep of all ranks of a pod, which is made again after a crash."""

    def __init__(self, ranks: Sequence[VirtualPod]) -> None:
        self._ranks = ranks
        self.regroup()
        for rank in ranks:
            rank.lockstep = self

    def regroup(self) -> None:
        self.group = LockstepGroup([rank.engine for rank in self._ranks])


def virtual_fleet(configs: Sequence[SimConfig], model: Model) -> list[VirtualPod]:
    """Return the engines of all ranks of these pods."""
    found: list[VirtualPod] = []
    for pod, config in enumerate(configs):
        size = config.data_parallel_size
        ranks = []
        for rank in range(size):
            own = replace(config, noise_seed=config.noise_seed + SEEDS_APART * rank)
            ranks.append(VirtualPod(len(found) + rank, own, model, pod=pod, rank=rank if size > 1 else None))
        if config.lockstep and size > 1:
            Lockstep(ranks)
        found += ranks
    return found
