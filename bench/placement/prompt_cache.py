"""What the foreign engines keep of prompts: whole blocks, found by others from the moment a request starts; what was
used longest ago goes first."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.replay.cache import ChunkPool, first
from proxy.replay.engine import Counted
from proxy.sim import SimConfig


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

    def fits(self, sequence: Counted) -> bool:
        whole, matched = _blocks(sequence), self.pool.match(sequence.parts, _blocks(sequence))
        return whole - matched + self.pool.idle_among(sequence.parts, matched) <= self.pool.free

    def start(self, sequence: Counted) -> None:
        """It holds its blocks from here on, and knows how many of its tokens were here."""
        whole = _blocks(sequence)
        matched = self.pool.match(sequence.parts, whole)
        self.pool.hold(first(sequence.parts, matched))
        self.pool.open(whole - matched)
        self.pool.name(sequence.parts, matched, whole)
        sequence.started, sequence.cached = True, matched * self._block_size
        self.queried += sequence.prompt
        self.hit += sequence.cached

    def release(self, sequence: Counted) -> None:
        self.pool.release(sequence.parts)

    def foreseen(self, sequence: Counted, came: Mapping[int, int]) -> int:
        """Tokens that are here, or came with those that began before it: blocks by the name of their chunk."""
        matched = 0
        for name, blocks in sequence.parts:
            here = min(blocks, max(self.pool.resident(name), came.get(name, 0)))
            matched += here
            if here < blocks:
                break
        return matched * self._block_size


def _blocks(sequence: Counted) -> int:
    return sum(blocks for _, blocks in sequence.parts)
