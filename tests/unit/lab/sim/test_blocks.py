from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.lab.cache import ChunkPool, blocks_of


def held_by(pool: ChunkPool, hashes: list[int]) -> None:
    """Fill and hold these blocks."""
    pool.open(len(hashes))
    fill(pool, hashes)


def fill(pool: ChunkPool, hashes: list[int]) -> None:
    for block in hashes:
        pool.name(((block, 1),), 0, 1)


def matched(pool: ChunkPool, hashes: list[int]) -> int:
    return pool.match(blocks_of(hashes), len(hashes))


def test_a_released_chain_is_found_again() -> None:
    pool = ChunkPool(8)
    held_by(pool, [1, 2, 3])
    pool.release(blocks_of([1, 2, 3]))
    assert matched(pool, [1, 2, 3, 4]) == 3
    assert (pool.used, pool.idle, pool.free) == (0, 3, 8)


def test_a_match_ends_at_the_first_missing_block() -> None:
    pool = ChunkPool(8)
    held_by(pool, [1, 2, 3])
    assert matched(pool, [1, 9, 3]) == 1


def test_the_end_of_a_chain_is_evicted_before_its_start() -> None:
    pool = ChunkPool(4)
    held_by(pool, [1, 2, 3])
    pool.release(blocks_of([1, 2, 3]))
    pool.open(2)
    assert matched(pool, [1, 2, 3]) == 2
    assert pool.evictions == 1


def test_a_block_in_use_is_never_evicted() -> None:
    pool = ChunkPool(4)
    held_by(pool, [1, 2])
    pool.hold(blocks_of([1, 2]))
    pool.release(blocks_of([1, 2]))
    pool.open(2)
    assert matched(pool, [1, 2]) == 2
    assert pool.free == 0


def test_sequences_that_fill_the_same_block_share_it() -> None:
    pool = ChunkPool(4)
    pool.open(2)
    fill(pool, [7, 7])
    assert pool.used == 1
    pool.release(blocks_of([7]))
    assert pool.used == 1


def test_a_reset_keeps_blocks_in_use() -> None:
    pool = ChunkPool(4)
    held_by(pool, [1, 2])
    pool.release(blocks_of([2]))
    pool.forget()
    assert matched(pool, [1, 2]) == 1


class PoolOfSequences(RuleBasedStateMachine):
    """Sequences come with chains that share beginnings, and go, in any order."""

    @initialize(capacity=st.integers(4, 12))
    def build(self, capacity: int) -> None:
        self.pool = ChunkPool(capacity)
        self.held: list[tuple[list[int], int]] = []

    @rule(family=st.integers(0, 2), length=st.integers(1, 5), extra=st.integers(0, 1))
    def come(self, family: int, length: int, extra: int) -> None:
        chain = [family * 100 + index for index in range(length)]
        here = matched(self.pool, chain)
        new = length - here + extra
        if new + self.pool.count_idle(blocks_of(chain[:here]), here) > self.pool.free:
            return
        self.pool.hold(blocks_of(chain[:here]))
        self.pool.open(new)
        fill(self.pool, chain[here:])
        self.held.append((chain, extra))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def go(self, which: int) -> None:
        chain, extra = self.held.pop(which % len(self.held))
        self.pool.release(blocks_of(chain), dropped=extra)
        assert matched(self.pool, chain) == len(chain)

    @invariant()
    def nothing_is_lost_and_nothing_is_held_twice(self) -> None:
        blocks = {block for chain, _ in self.held for block in chain}
        assert self.pool.used == len(blocks) + sum(extra for _, extra in self.held)
        assert self.pool.used + self.pool.idle <= self.pool.capacity
        for chain, _ in self.held:
            assert matched(self.pool, chain) == len(chain)


TestPoolOfSequences = PoolOfSequences.TestCase
