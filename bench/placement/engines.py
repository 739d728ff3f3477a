"""The models of an engine that a virtual fleet can be made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

from bench.placement.forecast import Forecast
from bench.placement.foreign import ForeignEngine
from bench.placement.lockstep import RankEngine
from bench.placement.ticking import TickingEngine
from proxy.lab.engine import CountedRequest, CountingEngine
from proxy.lab.sim import SimConfig


class Foreign(Protocol):
    def foresee(self, newcomer: CountedRequest, now: float) -> tuple[float, int]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """`make(config)`: an engine with what a `VirtualPod` uses of a `CountingEngine`. `foresee(engine, newcomer, now,
    before)`: when a request that came now would have its first token, infinite if not `before` some time, and how many
    of its tokens would be cached. `is_sated(engine)`: it has all the work that it can do at a time."""

    make: Callable[[SimConfig], Any]
    foresee: Callable[[Any, CountedRequest, float, float], tuple[float, int]]
    is_sated: Callable[[Any], bool] = attrgetter("waiting")


def _vllm(engine: CountingEngine, newcomer: CountedRequest, now: float, before: float) -> tuple[float, int]:
    forecast = Forecast(engine, newcomer, now)
    return forecast.first_token(before), forecast.cached


def _foreign(engine: Foreign, newcomer: CountedRequest, now: float, before: float) -> tuple[float, int]:
    first_token, cached = engine.foresee(newcomer, now)
    return (first_token if first_token < before else math.inf), cached


VLLM = Model(RankEngine, _vllm)

ENGINES: Mapping[str, Model] = MappingProxyType(
    {
        "vllm": VLLM,
        "llm-d-sim": Model(ForeignEngine, _foreign),
        "aiperf-mock": Model(TickingEngine, _foreign, attrgetter("is_sated")),
    }
)
"""By name. `vllm` is that of `kvlane sim`."""
