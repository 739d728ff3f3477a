"""What the foreign engines have in common: they keep whole blocks of prompts, found by others from the moment a request
starts; what was used longest ago goes first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from proxy.lab.cache import ChunkPool, first
from proxy.lab.engine import CountedRequest
from proxy.lab.sim import SimConfig
from proxy.lab.sim.engine import Pace


class PromptCache:
    """Of one pod. `queried` and `hit` are tokens."""

    def __init__(self, config: SimConfig) -> None:
        self.pool = ChunkPool(config.num_gpu_blocks)
        self.queried = 0
        self.hit = 0
        self._block_size = config.block_size

    @property
    def usage(self) -> float:
        return self.pool.used / self.pool.capacity

    def fits(self, sequence: CountedRequest) -> bool:
        whole, matched = _blocks(sequence), self.pool.match(sequence.parts, _blocks(sequence))
        return whole - matched + self.pool.count_idle(sequence.parts, matched) <= self.pool.free

    def start(self, sequence: CountedRequest) -> None:
        """It holds its blocks from here on, and knows how many of its tokens were here."""
        whole = _blocks(sequence)
        matched = self.pool.match(sequence.parts, whole)
        self.pool.hold(first(sequence.parts, matched))
        self.pool.open(whole - matched)
        self.pool.name(sequence.parts, matched, whole)
        sequence.started, sequence.cached = True, matched * self._block_size
        self.queried += sequence.prompt
        self.hit += sequence.cached

    def release(self, sequence: CountedRequest) -> None:
        self.pool.release(sequence.parts)

    def foreseen(self, sequence: CountedRequest, came: Mapping[int, int]) -> int:
        """Return the tokens that are cached, or came with sequences that started before: blocks by their chunk."""
        matched = 0
        for name, blocks in sequence.parts:
            here = min(blocks, max(self.pool.chunk(name).resident, came.get(name, 0)))
            matched += here
            if here < blocks:
                break
        return matched * self._block_size


class CachingEngine:
    """The cache interface of a `proxy.lab.engine.CountingEngine`, without a cache.

    Each engine has its own timing. Prompts are neither kept nor transferred."""

    fetching = 0

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.cache = PromptCache(config)
        self.until = math.inf
        self.preemptions = 0
        self._pace = Pace(config)

    @property
    def pool(self) -> ChunkPool:
        return self.cache.pool

    @property
    def prefilled_tokens(self) -> int:
        return self.queried_tokens - self.hit_tokens

    @property
    def queried_tokens(self) -> int:
        return self.cache.queried

    @property
    def hit_tokens(self) -> int:
        return self.cache.hit

    def let_go(self, sequence: CountedRequest, now: float) -> None:
        """It was never kept."""

    def generated_tokens(self, now: float) -> int:
        """Return -1: the engine does not count them."""
        return -1

    def kv_usage(self, now: float) -> float:
        return self.cache.usage


def _blocks(sequence: CountedRequest) -> int:
    return sum(blocks for _, blocks in sequence.parts)
