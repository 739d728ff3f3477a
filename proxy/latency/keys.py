"""Request data of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint


class LatencyForecast(Protocol):
    """How long a request would take where, read off the models at the moment of the call; all in seconds, in the order
    of the endpoints."""

    __slots__ = ()

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """The time to the first token, and what the choice costs those who are answered meanwhile."""

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Time to the first token."""

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Time per token after the first; as it would be now, without the prompts that may come."""

    def delays(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """By which others are answered later, all together, if the prompt is computed there."""

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        """For which the pod does nothing but the prompt, of which so many tokens are not cached."""

    @property
    def output(self) -> float:
        """Tokens of an answer, on average."""


class StageCosts(Protocol):
    """What one stage of a request costs where."""

    __slots__ = ()

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """In seconds, in the order of the endpoints."""


LATENCY: DataKey[LatencyForecast] = DataKey("LatencyPredictionInfo")

STAGE_COSTS: DataKey[StageCosts] = DataKey("StageCosts")
"""Of the stage whose profile runs, if a decider has said so; it is there for no longer."""
