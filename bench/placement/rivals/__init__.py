"""Other routers' policies, re-expressed from what is known of them; a file for each project.

`bench/agreement.py` holds `cache-aware` against the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

from bench.placement.pods import VirtualPod
from bench.placement.rivals.aibrix import PrefixCache
from bench.placement.rivals.dynamo import KvRouter
from bench.placement.rivals.hashing import BoundedPrefixHash, SessionHash
from bench.placement.rivals.llm_d import Affinity, Baseline, EndpointPicker
from bench.placement.rivals.production_stack import LoadAware, PrefixAware
from bench.placement.rivals.ray import PrefixTree
from bench.placement.rivals.sglang import CacheAware
from proxy.lab.simulation import Policy

RIVALS: Mapping[str, Callable[[Sequence[VirtualPod], Random], Policy]] = MappingProxyType(
    {
        "cache-aware": CacheAware,
        "llm-d": EndpointPicker,
        "llm-d-baseline": Baseline,
        "llm-d-affinity": Affinity,
        "session-hash": SessionHash,
        "prefix-hash": BoundedPrefixHash,
        "prefix-aware": PrefixAware,
        "load-aware": LoadAware,
        "aibrix": PrefixCache,
        "dynamo": KvRouter,
        "ray": PrefixTree,
    }
)
