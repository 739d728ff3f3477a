from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.lab.sim.engine import BlockPool


def held_by(pool: BlockPool, hashes: list[int]) -> None:
    """Fill and hold these blocks."""
    pool.open(len(hashes))
    for block in hashes:
        pool.fill(block)


def test_a_released_chain_is_found_again() -> None:
    pool = BlockPool(8)
    held_by(pool, [1, 2, 3])
    pool.release([1, 2, 3], 0)
    assert pool.longest_match([1, 2, 3, 4]) == 3
    assert (pool.used, pool.cached, pool.free) == (0, 3, 8)


def test_a_match_ends_at_the_first_block_that_is_missing() -> None:
    pool = BlockPool(8)
    held_by(pool, [1, 2, 3])
    assert pool.longest_match([1, 9, 3]) == 1


def test_the_end_of_a_chain_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(4)
    held_by(pool, [1, 2, 3])
    pool.release([1, 2, 3], 0)
    pool.open(2)
    assert pool.longest_match([1, 2, 3]) == 2
    assert pool.evictions == 1


def test_a_block_in_use_is_never_forgotten() -> None:
    pool = BlockPool(4)
    held_by(pool, [1, 2])
    pool.hold([1, 2])
    pool.release([1, 2], 0)
    pool.open(2)
    assert pool.longest_match([1, 2]) == 2
    assert pool.free == 0


def test_those_who_fill_the_same_block_share_it() -> None:
    pool = BlockPool(4)
    pool.open(2)
    pool.fill(7)
    pool.fill(7)
    assert pool.used == 1
    pool.release([7], 0)
    assert pool.used == 1


def test_forgetting_spares_what_is_in_use() -> None:
    pool = BlockPool(4)
    held_by(pool, [1, 2])
    pool.release([2], 0)
    pool.forget()
    assert pool.longest_match([1, 2]) == 1


class PoolOfSequences(RuleBasedStateMachine):
    """Sequences come with chains that share beginnings, and go, in any order."""

    @initialize(capacity=st.integers(4, 12))
    def build(self, capacity: int) -> None:
        self.pool = BlockPool(capacity)
        self.held: list[tuple[list[int], int]] = []

    @rule(family=st.integers(0, 2), length=st.integers(1, 5), extra=st.integers(0, 1))
    def come(self, family: int, length: int, extra: int) -> None:
        chain = [family * 100 + index for index in range(length)]
        matched = self.pool.longest_match(chain)
        new = length - matched + extra
        if new + self.pool.count_idle(chain[:matched]) > self.pool.free:
            return
        self.pool.hold(chain[:matched])
        self.pool.open(new)
        for block in chain[matched:]:
            self.pool.fill(block)
        self.held.append((chain, extra))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def go(self, which: int) -> None:
        chain, extra = self.held.pop(which % len(self.held))
        self.pool.release(chain, extra)
        assert self.pool.longest_match(chain) == len(chain)

    @invariant()
    def nothing_is_lost_and_nothing_is_held_twice(self) -> None:
        blocks = {block for chain, _ in self.held for block in chain}
        assert self.pool.used == len(blocks) + sum(extra for _, extra in self.held)
        assert self.pool.used + self.pool.cached <= self.pool.capacity
        for chain, _ in self.held:
            assert self.pool.longest_match(chain) == len(chain)


TestPoolOfSequences = PoolOfSequences.TestCase
