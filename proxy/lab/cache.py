"""The KV cache of one pod, counted in blocks and stored by chunks of a prompt.

A sequence that holds a block of a chunk holds all blocks before it, and blocks are released from the end of a prompt to
its beginning. So the cached part of a chunk is always its beginning, and one number describes it. An engine that knows
the text of each block makes chunks of one block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

Parts = Sequence[tuple[int, int]]
"""(name of a chunk together with all chunks before it, number of its blocks), from the beginning of a prompt."""


def blocks_of(hashes: Iterable[int]) -> Parts:
    return [(block, 1) for block in hashes]


class Chunk:
    """The state of one chunk: its first `resident` blocks are cached, and the first `held` of them are in use.
    `holders` lists how many blocks each sequence holds; `pieces` are the idle blocks, as keys of the pool's eviction
    order."""

    __slots__ = ("held", "holders", "pieces", "resident")

    def __init__(self) -> None:
        self.resident = self.held = 0
        self.holders: list[int] = []
        self.pieces: list[int] = []


class ChunkPool:
    """A KV cache of `capacity` blocks. Sequences hold `used` blocks, named and private ones; `idle` blocks are kept for
    reuse. `on_evicted` is called with the name of each chunk that is no longer cached."""

    def __init__(self, capacity: int, on_evicted: Callable[[int], object] | None = None) -> None:
        self.capacity = capacity
        self._on_evicted = on_evicted
        self.used = 0
        self.idle = 0
        self.evictions = 0
        self._chunks: dict[int, Chunk] = {}
        self._order: OrderedDict[int, list[int]] = OrderedDict()
        """Key of a piece -> [chunk, first block, end]; the oldest first. Chunk -1 is private: no prompt matches it."""
        self._next_key = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def chunk(self, name: int) -> Chunk:
        """Return the state of a chunk; to be read only."""
        return self._chunks.get(name) or Chunk()

    def pieces(self) -> Iterator[list[int]]:
        """Return the idle pieces as [chunk, first block, end], in the order of eviction. A piece is evicted from its
        end."""
        return iter(self._order.values())

    def match(self, parts: Parts, most: int) -> int:
        """Return the number of blocks from the beginning of the prompt that are cached, at most `most`."""
        matched = 0
        chunks = self._chunks
        for name, blocks in parts:
            chunk = chunks.get(name)
            if chunk is None:
                break
            if chunk.resident < blocks:
                matched += chunk.resident
                break
            matched += blocks
            if matched >= most:
                break
        return min(matched, most)

    def count_idle(self, parts: Parts, blocks: int) -> int:
        """Return how many of the first `blocks` blocks of the prompt are idle; all of them must be cached."""
        return sum(max(0, here - self._chunks[name].held) for name, here in first(parts, blocks))

    def open(self, blocks: int) -> None:
        """Allocate private blocks; the caller has checked that enough are free."""
        self.used += blocks
        if (excess := self.used + self.idle - self.capacity) > 0:
            self.evictions += excess
            self._drop(excess)

    def hold(self, parts: Parts) -> None:
        """Use cached blocks for a sequence; all of them must be cached."""
        for name, blocks in parts:
            self._hold(name, 0, blocks)

    def name(self, parts: Parts, named: int, whole: int) -> None:
        """Name the first `whole` blocks of a prompt. Its sequence holds the first `named` blocks under their names
        already and the others as private ones. A block that is already cached under its name is shared."""
        for name, blocks in first(parts, whole):
            if blocks > named:
                self.used -= blocks - max(0, named)
                self._hold(name, max(0, named), blocks)
            named -= blocks

    def release(self, parts: Parts, kept: int = 0, dropped: int = 0) -> None:
        """Release all blocks of one sequence: `dropped` private blocks that were not full, `kept` private blocks that
        were full, and the named blocks, from the end of the prompt."""
        self.used -= dropped
        if kept:
            self.used -= kept
            self._shelve(-1, 0, kept)
        for name, blocks in reversed(parts):
            chunk = self._chunks[name]
            chunk.holders.remove(blocks)
            held = chunk.held = max(chunk.holders, default=0)
            if held < blocks:
                self.used -= blocks - held
                chunk.pieces.append(self._shelve(name, held, blocks))

    def _hold(self, name: int, before: int, blocks: int) -> None:
        """Record that one sequence holds `blocks` blocks of a chunk instead of `before`."""
        chunk = self._chunks.get(name)
        if chunk is None:
            chunk = self._chunks[name] = Chunk()
        held = chunk.held
        if before:
            chunk.holders.remove(before)
        chunk.holders.append(blocks)
        if blocks > held:
            self.used += blocks - held
            chunk.held = blocks
            if chunk.pieces:
                self._reuse_idle(chunk, blocks)
            chunk.resident = max(chunk.resident, blocks)

    def _shelve(self, name: int, start: int, end: int) -> int:
        self._next_key += 1
        self._order[self._next_key] = [name, start, end]
        self.idle += end - start
        return self._next_key

    def _reuse_idle(self, chunk: Chunk, blocks: int) -> None:
        """Remove the first `blocks` blocks of the chunk from its idle pieces."""
        for key in list(chunk.pieces):
            piece = self._order[key]
            if piece[1] >= blocks:
                continue
            self.idle -= min(blocks, piece[2]) - piece[1]
            if piece[2] <= blocks:
                chunk.pieces.remove(key)
                del self._order[key]
            else:
                piece[1] = blocks

    def forget(self) -> None:
        self._drop(self.idle)

    def _drop(self, excess: int) -> None:
        """Evict the least recently used blocks."""
        while excess > 0:
            key, piece = next(iter(self._order.items()))
            name, start, end = piece
            gone = min(excess, end - start)
            piece[2] -= gone
            self.idle -= gone
            excess -= gone
            if piece[2] == start:
                del self._order[key]
            if name < 0:
                continue
            chunk = self._chunks[name]
            chunk.resident = piece[2]
            if piece[2] == start:
                chunk.pieces.remove(key)
            if not piece[2]:
                if self._on_evicted is not None:
                    self._on_evicted(name)
                if not chunk.holders:
                    del self._chunks[name]


def first(parts: Parts, blocks: int) -> list[tuple[int, int]]:
    """Return the parts that contain the first `blocks` blocks."""
    found = []
    for name, here in parts:
        if blocks <= 0:
            break
        found.append((name, min(here, blocks)))
        blocks -= here
    return found
