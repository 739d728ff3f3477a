"""A simulated pod on a virtual clock, whose engine can be foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.placement.engines import VLLM, Model
from proxy.lab import simulation
from proxy.lab.engine import CountedRequest
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import fleet_of

__all__ = ["VirtualPod", "virtual_fleet"]


class VirtualPod(simulation.VirtualPod):
    """Adds what the oracle and the measurement of the capacity need."""

    def __init__(
        self, index: int, config: SimConfig, model: Model = VLLM, *, pod: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(index, config, model.make, pod=pod, rank=rank)
        self._model = model

    @property
    def is_sated(self) -> bool:
        """It has all the work that it can do at a time."""
        return bool(self._model.is_sated(self.engine))

    def foresee(self, newcomer: CountedRequest, now: float, before: float) -> tuple[float, int]:
        """When a request that came now would have its first token, infinite if not `before` some time; and how many of
        its tokens it would find."""
        return self._model.foresee(self.engine, newcomer, now, before)


def virtual_fleet(configs: Sequence[SimConfig], model: Model) -> list[VirtualPod]:
    """Return the engines of all ranks of these pods."""
    return fleet_of(configs, partial(VirtualPod, model=model))
