"""How long it takes a KV cache to get from the pod that computed it to the one that answers: learnt online."""

from __future__ import annotations

from proxy.latency.regression import Regression
from proxy.latency.work import TOKEN_SCALE

MEMORY, TRUST = 0.98, 4.0
ALLOWANCE = 0.005
"""Seconds by which even the shortest may be off."""


class Transfer:
    """Seconds at all, and per token: of any two pods together. Lives as long as its plugin."""

    def __init__(self, fixed: float, per_token: float) -> None:
        """What is expected before the first was seen."""
        self._regression = Regression((fixed, per_token / TOKEN_SCALE, 0.0), MEMORY, TRUST)

    def seconds(self, tokens: float) -> float:
        return self._regression.predict((1.0, tokens * TOKEN_SCALE, 0.0))

    def observe(self, tokens: float, seconds: float) -> None:
        self._regression.observe((1.0, tokens * TOKEN_SCALE, 0.0), seconds, ALLOWANCE)
