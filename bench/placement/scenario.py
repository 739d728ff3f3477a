"""What the fleet of an experiment is like, and what befalls it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.placement.simulation import Restart
from proxy.sim import SimConfig
from proxy.sim.hardware import HARDWARE

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """Pod 0 is the one that is slow, and the one that restarts. `kv_tokens` 0: what the hardware has."""

    pods: int = 8
    hardware: str = "generic-8b"
    kv_tokens: int = 0
    slow_pod: float = 1.0
    noise: float = 0.0
    restart_at: float = 0.0
    restart_seconds: float = 5.0

    def configs(self, seed: int = 0) -> list[SimConfig]:
        hardware = HARDWARE[self.hardware]
        config = SimConfig(
            timing=hardware.timing,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            num_gpu_blocks=(self.kv_tokens or hardware.kv_tokens) // BLOCK,
            block_size=BLOCK,
            noise=self.noise,
        )
        return [
            replace(config, slowdown=1.0 if index else self.slow_pod, noise_seed=seed * 1_000 + index)
            for index in range(self.pods)
        ]

    @property
    def restarts(self) -> list[Restart]:
        return [Restart(0, self.restart_at, self.restart_seconds)] if self.restart_at else []
