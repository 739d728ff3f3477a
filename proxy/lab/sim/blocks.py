"""The KV cache as a pool of blocks: shared by reference count, kept for reuse, forgotten in LRU order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """`capacity` blocks. A block is open (being filled) or full, and then named by the hash of all text up to its end.

    Full blocks that nobody holds stay cached until their room is needed. Two sequences that fill the same block at
    the same time share it afterwards.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._open = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self._open + len(self._holders)

    @property
    def free(self) -> int:
        """Blocks that can be had, if need be by forgetting what they hold."""
        return self.capacity - self.used

    @property
    def cached(self) -> int:
        """Blocks kept for reuse only."""
        return len(self._idle)

    def longest_match(self, hashes: Iterable[int]) -> int:
        """How many of the chain's first blocks are here."""
        count = 0
        for block in hashes:
            if block not in self._holders and block not in self._idle:
                break
            count += 1
        return count

    def idle_among(self, hashes: Iterable[int]) -> int:
        return sum(block in self._idle for block in hashes)

    def hold(self, hashes: Iterable[int]) -> None:
        """Take cached blocks into use; each must be here."""
        for block in hashes:
            if block in self._idle:
                del self._idle[block]
                self._holders[block] = 1
            else:
                self._holders[block] += 1

    def open(self, count: int) -> None:
        """Take `count` blocks to be filled; the caller has made sure that so many are free."""
        self._open += count
        while self.used + len(self._idle) > self.capacity:
            self._idle.popitem(last=False)
            self.evictions += 1

    def fill(self, block: int) -> None:
        """An open block is full and from here on known by its hash."""
        self._open -= 1
        if block in self._idle:
            del self._idle[block]
        self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, hashes: list[int], open_blocks: int) -> None:
        """Give all blocks of one sequence back. The end of a chain is forgotten before its beginning."""
        self._open -= open_blocks
        for block in reversed(hashes):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
            else:
                del self._holders[block]
                self._idle[block] = None

    def forget(self) -> None:
        """Drop what is kept for reuse; what is in use stays."""
        self._idle.clear()
