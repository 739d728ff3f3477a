"""The policies that can be asked for by name; any other name is a kvlane configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import MappingProxyType

from bench.placement.oracle import Oracle
from bench.placement.pods import VirtualPod
from bench.placement.policy import EngineBalancer, LeastRequests, PowerOfTwo, RandomChoice, RoundRobin
from bench.placement.rivals import RIVALS
from proxy.config.load import load
from proxy.core.ports import ManualClock
from proxy.lab.kvlane import Kvlane
from proxy.lab.simulation import Policy
from proxy.settings import Settings

DEFAULT = "default"

NAMED: Mapping[str, Callable[[Sequence[VirtualPod], Random], Policy]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "random": RandomChoice,
        "least-requests": LeastRequests,
        "power-of-two": PowerOfTwo,
        "engine": EngineBalancer,
        **RIVALS,
        "oracle": Oracle,
    }
)


def make(name: str, pods: Sequence[VirtualPod], clock: ManualClock, rng: Random, *, says_cached: bool) -> Policy:
    """Raises ConfigError for a file that is no configuration."""
    if name in NAMED:
        return NAMED[name](pods, rng)
    settings = Settings() if name == DEFAULT else load(Path(name), os.environ)
    return Kvlane(settings, pods, clock, rng, says_cached=says_cached)
