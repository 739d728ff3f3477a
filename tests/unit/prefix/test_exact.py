"""What pods say they hold, matched block by block as an engine would."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint, EndpointState, Metrics
from proxy.core.ports import AllCleared, BlocksRemoved, BlocksStored, KvEvent, ManualClock
from proxy.core.request import Prompt
from proxy.prefix.exact import DEFAULT_BLOCK, HASH_BYTES, MOST_MEDIA, PAIR_BYTES, ExactIndex, ExactReservation
from proxy.prefix.match import ExactMatch
from tests.helpers.examples import examples

SIZE = 4


def pod(name: str = "pod", *adapters: str) -> Endpoint:
    return Endpoint(name, state=EndpointState.READY, adapters=frozenset(adapters))


def packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def prompt(ids: Sequence[int], salt: str = "") -> Prompt:
    return Prompt((packed(ids),), salt)


class Fleet:
    """An index, and the names that engines give to blocks: one counter per pod, so no two agree."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.index = ExactIndex(self.clock, **{"ttl": 2.0, "max_pairs": 10**6, **settings})
        self._names: dict[tuple[Endpoint, Any], int] = {}

    def name(self, endpoint: Endpoint, what: Any) -> int:
        return self._names.setdefault((endpoint, what), len(self._names) + 1000)

    def store(
        self, endpoint: Endpoint, ids: Sequence[int], start: int = 0, size: int = SIZE, rank: int = 0, **more: Any
    ) -> None:
        """The full blocks of the ids from the block `start` on, in one event."""
        keys = (more.get("lora", ""), repeatable(more.get("keys", ())))
        ends = range((start + 1) * size, len(ids) + 1, size)
        parent = self.name(endpoint, (keys, size, tuple(ids[: start * size]))) if start else None
        names = [self.name(endpoint, (keys, size, tuple(ids[:end]))) for end in ends]
        tokens = packed(ids[start * size : ends[-1]])
        self.tell(endpoint, BlocksStored(names, parent, tokens, size, **more), rank=rank)

    def remove(self, endpoint: Endpoint, ids: Sequence[int], rank: int = 0, medium: str = "gpu") -> None:
        """The last full block of the ids."""
        names = [self.name(endpoint, (("", "()"), SIZE, tuple(ids)))]
        self.tell(endpoint, BlocksRemoved(names, medium), rank=rank)

    def tell(self, endpoint: Endpoint, *events: KvEvent, rank: int = 0) -> None:
        self.index.published(endpoint, rank, events)

    def cached(self, ids: Sequence[int], *endpoints: Endpoint, model: str = "m", salt: str = "") -> list[int]:
        """Tokens of a prompt that the endpoints are matched for."""
        match = ExactMatch(self.index, prompt(ids, salt), model, endpoints)
        return [blocks * match.block_size for blocks in match.matched(endpoints)]

    def reserve(self, ids: Sequence[int], endpoint: Endpoint) -> list[ExactReservation]:
        match = ExactMatch(self.index, prompt(ids), "m", [endpoint])
        return [self.index.reserve(chain, endpoint, depth) for chain, depth in match.reserved(endpoint)]


def repeatable(keys: Any) -> str:
    return repr(keys)


def test_full_blocks_from_the_start_count_and_the_last_token_never_does() -> None:
    fleet, one, other = Fleet(), pod("one"), pod("other")
    ids = list(range(14))
    fleet.store(one, ids)
    assert fleet.cached(ids, one, other) == [12, 0]
    assert fleet.cached(ids[:13], one) == [12]
    assert fleet.cached(ids[:12], one) == [8]
    assert fleet.cached([*ids[:9], 99, 99], one) == [8]
    assert fleet.cached([99, *ids], one) == [0]
    assert fleet.cached([], one) == [0]


def test_blocks_are_chained_with_any_engine_hashes() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(40))
    fleet.store(one, ids[:8])
    fleet.store(one, ids[:24], start=2)
    fleet.store(one, ids, start=6)
    assert fleet.cached(ids, one) == [36]
    assert fleet.index.orphans == 0


def test_a_block_with_an_unknown_parent_is_not_counted() -> None:
    fleet, one = Fleet(), pod()
    fleet.store(one, list(range(12)), start=1)
    assert fleet.cached(list(range(12)), one) == [0]
    assert fleet.index.orphans == 2
    assert fleet.index.pairs == 0


def test_a_gap_ends_a_match() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(17))
    fleet.store(one, ids)
    fleet.remove(one, ids[:8])
    assert fleet.cached(ids, one) == [4]


def test_a_block_stored_twice_stays_until_both_are_removed() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(5))
    fleet.store(one, ids)
    fleet.store(one, ids)
    fleet.remove(one, ids[:4])
    assert fleet.cached(ids, one) == [4]
    fleet.remove(one, ids[:4])
    assert fleet.cached(ids, one) == [0]
    assert fleet.index.bytes == 0


def test_an_adapter_has_its_own_cache() -> None:
    fleet, one, other = Fleet(), pod("one", "poems"), pod("other")
    ids = list(range(9))
    fleet.store(one, ids)
    fleet.store(other, ids)
    assert fleet.cached(ids, one, other, model="poems") == [0, 8]
    fleet.store(one, ids, lora="poems")
    assert fleet.cached(ids, one, model="poems") == [8]
    assert fleet.cached(ids, one, model="poems", salt="x") == [0]


def test_salts_separate_prompts_and_media_are_not_texts() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(9))
    fleet.store(one, ids, keys=[["salt"], None])
    assert fleet.cached(ids, one) == [0]
    assert fleet.cached(ids, one, salt="salt") == [8]
    fleet.store(one, [*ids[:4], 50, 51, 52, 53], start=0, keys=[None, [["image", 3]]])
    assert fleet.cached([*ids[:4], 50, 51, 52, 53, 9], one) == [4]


def test_slower_tiers_count_with_their_weight() -> None:
    fleet, one = Fleet(weights={"gpu": 1.0, "cpu": 0.5}), pod()
    ids = list(range(21))
    fleet.store(one, ids[:8])
    fleet.store(one, ids, start=2, medium="cpu")
    assert fleet.cached(ids, one) == [12]
    fleet.store(one, ids[:12], start=2)
    assert fleet.cached(ids, one) == [16]
    fleet.tell(one, BlocksRemoved([fleet.name(one, (("", "()"), SIZE, tuple(ids[:12])))], "cpu"))
    assert fleet.cached(ids, one) == [16]


def test_a_tier_may_refer_to_blocks_of_another_without_tokens() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(9))
    fleet.store(one, ids)
    names = [fleet.name(one, (("", "()"), SIZE, tuple(ids[:end]))) for end in (4, 8)]
    fleet.tell(one, BlocksStored(names, None, b"", SIZE, medium="cpu"))
    fleet.remove(one, ids[:4])
    fleet.remove(one, ids[:8])
    assert fleet.cached(ids, one) == [8]
    fleet.tell(one, BlocksStored([7777], None, b"", SIZE, medium="cpu"))
    assert fleet.index.orphans == 1


def test_the_rank_with_the_most_blocks_counts() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(13))
    fleet.store(one, ids[:8], rank=0)
    fleet.store(one, ids, rank=1)
    assert fleet.cached(ids, one) == [12]
    fleet.index.lost(one, 1)
    assert fleet.cached(ids, one) == [8]


def test_other_kinds_of_layers_do_not_count_twice() -> None:
    fleet, one = Fleet(), pod()
    ids = list(range(9))
    fleet.store(one, ids)
    fleet.store(one, ids, group=1)
    names = [fleet.name(one, (("", "()"), SIZE, tuple(ids[:4])))]
    fleet.tell(one, BlocksRemoved(names, group=1))
    assert fleet.cached(ids, one) == [8]
    fleet.tell(one, BlocksRemoved(names, group=0))
    assert fleet.cached(ids, one) == [0]


def test_pods_may_have_blocks_of_different_sizes() -> None:
    fleet, one, other = Fleet(), pod("one"), pod("other")
    ids = list(range(25))
    fleet.store(one, ids, size=4)
    fleet.store(other, ids, size=6)
    match = ExactMatch(fleet.index, prompt(ids), "m", [one, other])
    assert match.block_size == 2
    assert match.matched([one, other]) == [12, 12]
    assert match.total == 12
    assert match.missing([one, other], 9999) == [1, 1]


def test_the_block_size_is_that_of_the_events_or_metrics_or_configuration() -> None:
    fleet, one = Fleet(block_size=32), pod()
    assert fleet.index.block_size(one) == 32
    one.publish(Metrics(block_size=64), 0)
    assert fleet.index.block_size(one) == 64
    fleet.store(one, list(range(8)))
    assert fleet.index.block_size(one) == SIZE
    assert Fleet().index.block_size(pod()) == DEFAULT_BLOCK


def test_a_cleared_lost_or_removed_cache_is_empty() -> None:
    fleet, one, other = Fleet(), pod("one"), pod("other")
    ids = list(range(9))
    forgetting: list[Callable[[], None]] = [
        lambda: fleet.tell(one, AllCleared()),
        lambda: fleet.index.lost(one, 0),
        lambda: fleet.index.gone(one),
    ]
    for forget in forgetting:
        fleet.store(one, ids)
        fleet.store(other, ids)
        fleet.reserve([*ids, 1, 2, 3, 4], one)
        forget()
        assert fleet.cached(ids, one, other) == [0, 8]
        fleet.index.gone(one)
        fleet.index.gone(other)
        assert fleet.index.bytes == 0


def test_a_new_pod_inherits_no_blocks() -> None:
    fleet, ids = Fleet(), list(range(9))
    for number in range(20):
        one = pod(f"pod-{number}")
        assert fleet.cached(ids, one) == [0]
        fleet.store(one, ids)
        fleet.index.gone(one)
    assert fleet.index._bits == 2


def test_a_pod_is_known_while_all_ranks_are_known_and_responses_agree() -> None:
    fleet, one = Fleet(), pod()
    assert not fleet.index.is_sure(one)
    fleet.index.complete(one, 0, True)
    assert fleet.index.is_sure(one)
    fleet.index.complete(one, 1, False)
    assert not fleet.index.is_sure(one)
    fleet.index.complete(one, 1, True)
    assert [fleet.index.judge(one, False) for _ in range(4)] == [False, False, True, False]
    assert not fleet.index.is_sure(one)
    fleet.index.judge(one, True)
    assert fleet.index.is_sure(one)
    fleet.index.lost(one, 1)
    assert not fleet.index.is_sure(one)
    assert not fleet.index.judge(pod(), False)


def test_sent_prompts_count_until_events_confirm_them() -> None:
    fleet, one = Fleet(), pod()
    fleet.index.complete(one, 0, True)
    fleet.store(one, [0] * SIZE)
    ids = list(range(13))
    (reservation,) = fleet.reserve(ids, one)
    assert fleet.cached(ids, one) == [12]
    assert fleet.index.expects(one)
    fleet.store(one, ids)
    assert not fleet.index.expects(one)
    fleet.index.release(reservation, computed=True)
    fleet.remove(one, ids[:4])
    assert fleet.cached(ids, one) == [0]


def test_a_pod_without_events_may_expect_blocks() -> None:
    fleet, one = Fleet(block_size=SIZE), pod()
    fleet.reserve(list(range(9)), one)
    assert fleet.cached(list(range(9)), one) == [8]


def test_unconfirmed_blocks_are_dropped_in_time() -> None:
    fleet, one = Fleet(block_size=SIZE), pod()
    ids = list(range(9))
    (reservation,) = fleet.reserve(ids, one)
    fleet.clock.advance(3600)
    fleet.index.sweep()
    assert fleet.cached(ids, one) == [8], "the request is still on its way"
    fleet.index.release(reservation, computed=True)
    fleet.clock.advance(1.9)
    fleet.index.sweep()
    assert fleet.cached(ids, one) == [8]
    fleet.clock.advance(0.2)
    fleet.index.sweep()
    assert fleet.cached(ids, one) == [0]
    assert fleet.index.bytes == 0


def test_a_failed_request_leaves_no_expected_blocks() -> None:
    fleet, one = Fleet(block_size=SIZE), pod()
    ids = list(range(9))
    (first,) = fleet.reserve(ids, one)
    (second,) = fleet.reserve([*ids[:4], *range(100, 109)], one)
    fleet.index.release(second, computed=False)
    assert fleet.cached(ids, one) == [8]
    fleet.index.release(first, computed=False)
    assert fleet.cached(ids, one) == [0]


def test_a_failed_request_keeps_a_block_that_an_earlier_one_computes() -> None:
    fleet, one = Fleet(block_size=SIZE), pod()
    ids = list(range(9))
    fleet.reserve(ids, one)
    fleet.store(one, ids[:4])
    fleet.remove(one, ids[:4])
    (second,) = fleet.reserve(ids, one)
    fleet.index.release(second, computed=False)
    fleet.store(one, ids[:4])
    assert fleet.cached(ids, one) == [8]


def test_a_frozen_match_does_not_see_its_own_blocks() -> None:
    fleet, one = Fleet(block_size=SIZE), pod()
    match = ExactMatch(fleet.index, prompt(range(9)), "m", [one])
    assert match.matched([one]) == [0]
    match.frozen = True
    fleet.reserve(range(9), one)
    assert match.matched([one]) == [0]
    assert match.matched([pod("stranger")]) == [0]


def test_a_pod_added_after_the_match_is_matched() -> None:
    fleet, one, late = Fleet(), pod("one"), pod("late")
    ids = list(range(9))
    fleet.store(one, ids)
    match = ExactMatch(fleet.index, prompt(ids), "m", [one])
    fleet.store(late, ids[:4])
    assert match.matched([late, one]) == [1, 2]
    fleet.store(late, ids, start=1)
    assert match.matched([late, one]) == [2, 2]


def test_prompts_of_a_batch_are_summed() -> None:
    fleet, one = Fleet(), pod()
    fleet.store(one, list(range(9)))
    both = Prompt((packed(range(9)), packed([*range(5), 99, 99])))
    match = ExactMatch(fleet.index, both, "m", [one])
    assert match.matched([one]) == [3]
    assert match.total == 3
    assert match.missing([one], 0) == [4]


def test_a_full_index_stores_no_more_and_its_pods_are_unknown() -> None:
    fleet, one = Fleet(max_pairs=2), pod()
    fleet.index.complete(one, 0, True)
    fleet.store(one, list(range(8)))
    assert fleet.index.is_sure(one)
    fleet.store(one, list(range(12)), start=2)
    assert fleet.index.pairs == 2
    assert fleet.index.bytes == 2 * (PAIR_BYTES + HASH_BYTES)
    assert not fleet.index.is_sure(one)


def test_a_pod_with_endless_new_media_uses_bounded_masks_and_is_unknown() -> None:
    fleet, one = Fleet(), pod()
    fleet.index.complete(one, 0, True)
    for number in range(MOST_MEDIA):
        fleet.store(one, [4 * number + each for each in range(SIZE)], medium=f"tier {number}")
    assert fleet.index.is_sure(one)
    fleet.store(one, [1000 + each for each in range(SIZE)], medium="one more")
    fleet.tell(one, *(BlocksStored((), None, b"", SIZE, medium=f"empty {number}") for number in range(100)))
    assert fleet.index.pairs == MOST_MEDIA
    assert not fleet.index.is_sure(one)
    assert max(fleet.index._masks.values()).bit_length() <= MOST_MEDIA + 1


steps = st.lists(
    st.tuples(st.sampled_from(["store", "store", "remove", "lost", "clear"]), st.integers(0, 2), st.integers(0, 15)),
    max_size=40,
)


@settings(max_examples=examples(60), deadline=None)
@given(steps)
def test_it_agrees_with_sets_of_whole_prefixes(given_steps: list[tuple[str, int, int]]) -> None:
    """Prompts are paths in a tree of 16 leaves, four blocks deep; each pod's cache is a set of the prefixes it has."""
    fleet, pods = Fleet(), [pod(str(number)) for number in range(3)]
    held: list[set[tuple[int, ...]]] = [set() for _ in pods]
    for what, which, leaf in given_steps:
        ids, one, mine = path(leaf), pods[which], held[which]
        if what == "store":
            depth = next((at for at in range(4) if tuple(ids[: (at + 1) * SIZE]) not in mine), 4)
            if depth < 4 and not any(tuple(ids[: (at + 1) * SIZE]) in mine for at in range(depth, 4)):
                fleet.store(one, ids, start=depth)
                mine.update(tuple(ids[: (at + 1) * SIZE]) for at in range(depth, 4))
        elif what == "remove":
            gone = tuple(ids[: (1 + leaf % 4) * SIZE])
            fleet.remove(one, gone)
            mine.discard(gone)
        elif what == "lost":
            fleet.index.lost(one, 0)
            mine.clear()
        else:
            fleet.tell(one, AllCleared())
            mine.clear()
        assert fleet.index.pairs == sum(map(len, held))
    for leaf in range(16):
        ids = [*path(leaf), 7]
        expected = [
            SIZE * next((at for at in range(4) if tuple(ids[: (at + 1) * SIZE]) not in mine), 4) for mine in held
        ]
        assert fleet.cached(ids, *pods) == expected


def path(leaf: int) -> list[int]:
    return [token for depth in range(4) for token in [depth, leaf >> (3 - depth), 5, 5]]


def test_the_version_changes_whenever_a_match_could() -> None:
    fleet, one = Fleet(), pod()
    match = ExactMatch(fleet.index, prompt(range(9)), "m", [one])
    assert match.matched([one]) == [0]
    fleet.store(one, list(range(8)))
    match = ExactMatch(fleet.index, prompt(range(9)), "m", [one])
    assert match.matched([one]) == [2]
    fleet.remove(one, list(range(8)))
    assert match.matched([one]) == [1]


@pytest.mark.parametrize("blocks", [1, 2_800])  # tables have just grown, and are as empty as they get
def test_memory_stays_below_its_limit(blocks: int) -> None:
    """Measured by taking everything apart: the tables, and every integer in them."""
    import sys

    fleet, one = Fleet(), pod()
    fleet.store(one, list(range(blocks * SIZE)))
    (rank,) = fleet.index._pods[one].ranks.values()
    (shelf,) = rank.shelves.values()
    size = sys.getsizeof(shelf.own) + sys.getsizeof(fleet.index._masks)
    size += sum(map(sys.getsizeof, (*shelf.own, *shelf.own.values(), *fleet.index._masks.values())))
    assert size < fleet.index.bytes + 2000
