"""What the fleet of an experiment is like, and what befalls it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.placement.engines import ENGINES, VLLM
from bench.placement.pods import VirtualPod, virtual_fleet
from proxy.lab.sim import SimConfig
from proxy.lab.sim.config import HARDWARE, Hardware
from proxy.lab.simulation import Restart

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """Pod 0 is the one that is slow, and the one that restarts. `kv_tokens` 0: what the hardware has. Several pairs of
    hardware, divided by "+", take turns. `engine` is one of ENGINES; all but `vllm` have a timing of their own, and
    of the hardware only the memory. Each pod has `ranks` data-parallel ranks, each of them as fast and as large as the
    hardware; with `lockstep` they step together."""

    pods: int = 8
    engine: str = "vllm"
    hardware: str = "generic-8b"
    kv_tokens: int = 0
    slow_pod: float = 1.0
    noise: float = 0.0
    ranks: int = 1
    lockstep: bool = False
    restart_at: float = 0.0
    restart_seconds: float = 5.0

    def configs(self, seed: int = 0) -> list[SimConfig]:
        kinds = [self._config(HARDWARE[name]) for name in self.hardware.split("+")]
        return [
            replace(
                kinds[index % len(kinds)],
                slowdown=1.0 if index else self.slow_pod,
                noise_seed=seed * 1_000 + index,
            )
            for index in range(self.pods)
        ]

    def fleet(self, seed: int = 0) -> list[VirtualPod]:
        """New pods, with nothing in their memory."""
        return virtual_fleet(self.configs(seed), ENGINES[self.engine])

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and response that every pod accepts."""
        return min(config.context_length for config in self.configs())

    def _config(self, hardware: Hardware) -> SimConfig:
        lockstep = self.lockstep and ENGINES[self.engine] is VLLM  # the other engines have no steps
        config = hardware.equip(
            SimConfig(block_size=BLOCK, noise=self.noise, data_parallel_size=self.ranks, lockstep=lockstep)
        )
        return replace(config, num_gpu_blocks=self.kv_tokens // BLOCK) if self.kv_tokens else config

    @property
    def restarts(self) -> list[Restart]:
        return [Restart(0, self.restart_at, self.restart_seconds)] if self.restart_at else []
