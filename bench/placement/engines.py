"""The models of an engine that a virtual fleet can be made of."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from bench.placement.forecast import Forecast
from bench.placement.foreign import ForeignEngine
from proxy.replay.cache import ChunkPool
from proxy.replay.engine import Counted, CountingEngine, Event
from proxy.sim import SimConfig


class Engine(Protocol):
    """`CountingEngine` says what its members mean."""

    config: SimConfig
    pool: ChunkPool
    waiting: deque[Counted]
    running: list[Counted]
    until: float
    preemptions: int
    queried_tokens: int
    hit_tokens: int

    @property
    def busy(self) -> bool: ...
    def submit(self, sequence: Counted, now: float) -> None: ...
    @property
    def fetching(self) -> int: ...
    def finish(self) -> list[Event]: ...
    def let_go(self, sequence: Counted, now: float) -> None: ...
    def kv_usage(self, now: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Model:
    """`foresee(engine, newcomer, now, before)`: when a request that came now would have its first token, infinite if
    not `before` some time, and how many of its tokens would be cached."""

    make: Callable[[SimConfig], Engine]
    foresee: Callable[[Any, Counted, float, float], tuple[float, int]]


def _vllm(engine: CountingEngine, newcomer: Counted, now: float, before: float) -> tuple[float, int]:
    forecast = Forecast(engine, newcomer, now)
    return forecast.first_token(before), forecast.cached


def _llm_d_sim(engine: ForeignEngine, newcomer: Counted, now: float, before: float) -> tuple[float, int]:
    first_token, cached = engine.foresee(newcomer, now)
    return (first_token if first_token < before else math.inf), cached


VLLM = Model(CountingEngine, _vllm)

ENGINES: Mapping[str, Model] = MappingProxyType({"vllm": VLLM, "llm-d-sim": Model(ForeignEngine, _llm_d_sim)})
"""By name. `vllm` is that of `kvlane sim`."""
