"""How long the steps of one pod take: what they compute, how slow the pod is, and chance."""

from __future__ import annotations

import math
from random import Random

from proxy.lab.sim.config import SimConfig


class Pace:
    """Lives as long as the engine: the chance of a step is drawn from its own seeded generator."""

    def __init__(self, config: SimConfig) -> None:
        self._timing = config.timing
        self._slowdown = config.slowdown
        self._sigma = math.sqrt(math.log1p(config.noise**2))
        self._rng = Random(config.noise_seed)

    def seconds(self, prefill_tokens: int, sequences: int, attended: float, tokens_read: int) -> float:
        return self._timing.step(prefill_tokens, sequences, attended, tokens_read) * self.factor()

    def factor(self) -> float:
        """For one step; its mean is the pod's slowdown."""
        if not self._sigma:
            return self._slowdown
        return self._slowdown * self._rng.lognormvariate(-(self._sigma**2) / 2, self._sigma)
