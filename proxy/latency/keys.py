"""Request data of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint


class LatencyForecast(Protocol):
    """What each pod would cost, read off the models at the moment of the call."""

    __slots__ = ()

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Seconds."""


LATENCY: DataKey[LatencyForecast] = DataKey("LatencyPredictionInfo")
