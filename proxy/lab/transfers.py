"""How the KV cache of prompts comes into a pod from those that computed them."""

from __future__ import annotations

from proxy.lab.sim.config import TransferTiming


class Link:
    """What is fetched at a time shares it, first come, first served."""

    def __init__(self, timing: TransferTiming) -> None:
        self._timing = timing
        self._free_at = 0.0

    def fetch(self, tokens: int, now: float) -> float:
        """When so many tokens that are asked for at this time are here."""
        self._free_at = max(now, self._free_at - self._timing.base) + self._timing.seconds(tokens)
        return self._free_at
