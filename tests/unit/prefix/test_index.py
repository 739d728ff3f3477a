import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.prefix.feedback import WORK
from proxy.prefix.hashing import Chain
from proxy.prefix.index import PrefixIndex

CAPACITY = 1 << 40
A, B = Endpoint("a"), Endpoint("b")


def blocks(start: int, length: int) -> Chain:
    return list(range(start, start + length))


def hold(index: PrefixIndex, chain: Chain, endpoint: Endpoint, capacity: int = CAPACITY) -> None:
    index.confirm(index.reserve((chain,), endpoint, capacity))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(clock: ManualClock) -> PrefixIndex:
    return PrefixIndex(clock, max_siblings=16)


def test_a_reservation_is_visible_at_once_and_a_failure_undoes_it(index: PrefixIndex) -> None:
    reservation = index.reserve((blocks(1, 5),), A, CAPACITY)
    assert index.match(blocks(1, 5)) == {A: 5}
    index.release(reservation)
    assert index.match(blocks(1, 5)) == {}
    assert (index.pairs, index.blocks(A)) == (0, 0)


def test_a_failure_keeps_blocks_confirmed_by_others(index: PrefixIndex) -> None:
    failing = index.reserve((blocks(1, 5),), A, CAPACITY)
    hold(index, blocks(1, 3), A)
    index.release(failing)
    assert index.match(blocks(1, 5)) == {A: 3}


def test_a_failure_keeps_blocks_reserved_by_others(index: PrefixIndex) -> None:
    failing, waiting = (index.reserve((blocks(1, 5),), A, CAPACITY) for _ in range(2))
    index.release(failing)
    assert index.match(blocks(1, 5)) == {A: 5}
    index.release(waiting)
    assert index.match(blocks(1, 5)) == {}


def test_a_reservation_is_settled_once(index: PrefixIndex) -> None:
    reservation = index.reserve((blocks(1, 5),), A, CAPACITY)
    index.confirm(reservation)
    index.release(reservation)
    index.confirm(reservation)
    assert index.match(blocks(1, 5)) == {A: 5}
    hold(index, blocks(11, 10), A, 10)
    assert (index.match(blocks(1, 5)), index.match(blocks(11, 10))) == ({}, {A: 10})


def test_provisional_blocks_attract_a_bounded_number_of_siblings(index: PrefixIndex) -> None:
    riders = [index.reserve((blocks(1, 5),), A, CAPACITY) for _ in range(15)]
    assert index.match(blocks(1, 5)) == {A: 5}
    riders.append(index.reserve((blocks(1, 5),), A, CAPACITY))
    assert index.match(blocks(1, 5)) == {}
    index.release(riders.pop())
    assert index.match(blocks(1, 5)) == {A: 5}


def test_one_successful_response_opens_the_blocks_to_any_number(index: PrefixIndex) -> None:
    riders = [index.reserve((blocks(1, 5),), A, CAPACITY) for _ in range(40)]
    index.confirm(riders.pop())
    assert index.match(blocks(1, 5)) == {A: 5}


def test_siblings_are_counted_on_shared_blocks_only(index: PrefixIndex) -> None:
    hold(index, blocks(1, 2), A)
    for number in range(16):
        index.reserve((blocks(1, 4) + blocks(100 * (number + 1), 3),), A, CAPACITY)
    assert index.match(blocks(1, 4) + blocks(100, 3)) == {A: 2}
    assert index.match(blocks(1, 2)) == {A: 2}


@pytest.mark.parametrize(("burst", "pods"), [(64, 4), (16, 1), (17, 2), (128, 8)])
def test_a_burst_of_identical_cold_prompts_stays_on_a_few_pods(index: PrefixIndex, burst: int, pods: int) -> None:
    fleet = [Endpoint(f"pod-{number}") for number in range(8)]
    sent = dict.fromkeys(fleet, 0)
    for _ in range(burst):
        depths = index.match(blocks(1, 20))
        target = max(fleet, key=lambda endpoint: (depths.get(endpoint, 0), -sent[endpoint]))
        sent[target] += 1
        index.reserve((blocks(1, 20),), target, CAPACITY)
    assert sum(count > 0 for count in sent.values()) == pods


def test_a_batch_reserves_all_of_its_chains(index: PrefixIndex) -> None:
    index.confirm(index.reserve((blocks(1, 2), blocks(11, 3)), A, CAPACITY))
    assert (index.match(blocks(1, 2)), index.match(blocks(11, 3))) == ({A: 2}, {A: 3})


def test_eviction_takes_the_longest_unused_chain_from_its_end(index: PrefixIndex) -> None:
    hold(index, blocks(1, 6), A, 10)
    hold(index, blocks(11, 4), A, 10)
    hold(index, blocks(21, 2), A, 10)
    assert [index.match(blocks(start, 6)) for start in (1, 11, 21)] == [{A: 4}, {A: 4}, {A: 2}]


def test_recently_used_blocks_outlive_unused_ones(index: PrefixIndex) -> None:
    hold(index, blocks(1, 5), A, 10)
    hold(index, blocks(11, 5), A, 10)
    hold(index, blocks(1, 2), A, 10)
    hold(index, blocks(21, 4), A, 10)
    assert [index.match(blocks(start, 5)) for start in (1, 11)] == [{A: 2}, {A: 4}]


def test_eviction_on_one_pod_leaves_the_others_alone(index: PrefixIndex) -> None:
    hold(index, blocks(1, 6), A, 6)
    hold(index, blocks(1, 6), B, 6)
    hold(index, blocks(11, 3), A, 6)
    assert index.match(blocks(1, 6)) == {A: 3, B: 6}


def test_large_memories_are_evicted_somewhat_below_their_capacity(clock: ManualClock) -> None:
    index = PrefixIndex(clock, max_siblings=16, depths=range(6401))
    hold(index, blocks(1, 6400), A, 6400)
    hold(index, blocks(10_000, 1), A, 6400)
    assert index.blocks(A) == 6300


def test_deep_hashes_count_as_the_blocks_they_cover(index: PrefixIndex) -> None:
    hold(index, blocks(1, 160), A)
    assert index.match(blocks(1, 160)) == {A: 512}
    assert index.match(blocks(1, 100) + blocks(1000, 60)) == {A: 144}
    assert (index.blocks(A), index.pairs) == (512, 512)


def test_a_pod_holds_no_hash_for_which_it_has_only_partial_capacity(index: PrefixIndex) -> None:
    hold(index, blocks(1, 160), A, 67)
    assert (index.match(blocks(1, 160)), index.blocks(A)) == ({A: 66}, 66)


def test_a_deep_hash_is_evicted_as_a_whole(index: PrefixIndex) -> None:
    hold(index, blocks(1, 66), A, 100)
    hold(index, blocks(1000, 33), A, 100)
    assert (index.match(blocks(1, 66)), index.match(blocks(1000, 33))) == ({A: 66}, {A: 33})
    assert index.blocks(A) == 99


def test_a_prompt_larger_than_the_pod_is_held_partly_and_leaks_nothing(index: PrefixIndex) -> None:
    hold(index, blocks(1, 50), A, 10)
    assert index.match(blocks(1, 50)) == {A: 10}
    hold(index, blocks(101, 50), A, 10)
    assert (index.match(blocks(1, 50)), index.match(blocks(101, 50))) == ({}, {A: 10})
    index.forget(A)
    assert index.pairs == 0


def test_blocks_of_requests_in_flight_are_not_evicted(index: PrefixIndex) -> None:
    index.reserve((blocks(1, 6),), A, 10)
    hold(index, blocks(11, 10), A, 10)
    assert (index.match(blocks(1, 6)), index.match(blocks(11, 10))) == ({A: 6}, {A: 4})


def test_a_pod_whose_memory_shrinks_drops_the_excess(index: PrefixIndex) -> None:
    hold(index, blocks(1, 30), A, 30)
    hold(index, blocks(1, 1), A, 5)
    assert index.match(blocks(1, 30)) == {A: 5}


def test_a_pod_whose_memory_shrinks_drops_the_excess_before_the_response(index: PrefixIndex) -> None:
    hold(index, blocks(1, 4), A, 30)
    hold(index, blocks(11, 20), A, 30)
    index.reserve((blocks(1, 4),), A, 5)
    assert (index.match(blocks(1, 4)), index.match(blocks(11, 20))) == ({A: 4}, {A: 1})


def test_blocks_unused_for_the_ttl_are_dropped_on_every_pod(clock: ManualClock) -> None:
    index = PrefixIndex(clock, max_siblings=16, ttl=60)
    hold(index, blocks(1, 5), A)
    hold(index, blocks(1, 5), B)
    clock.advance(30)
    hold(index, blocks(1, 2), A)
    clock.advance(31)
    hold(index, blocks(100, 1), A)
    assert index.match(blocks(1, 5)) == {A: 2}


def test_a_request_in_flight_keeps_its_blocks_beyond_the_ttl(clock: ManualClock) -> None:
    index = PrefixIndex(clock, max_siblings=16, ttl=60)
    hold(index, blocks(1, 5), A)
    long_one = index.reserve((blocks(1, 5),), A, CAPACITY)
    clock.advance(1000)
    hold(index, blocks(100, 1), A)
    index.release(long_one)
    assert index.match(blocks(1, 5)) == {A: 5}


def test_a_removed_pod_is_void_at_once_and_its_bit_is_not_inherited(index: PrefixIndex) -> None:
    many = 3 * WORK
    for number in range(many):
        hold(index, blocks(10 * number, 1), A)
    hold(index, blocks(10, 1), B)
    index.forget(A)
    assert 0 < index.pairs - 1 < many, "the test needs a pod that is not cleared in one go"
    successor = Endpoint("successor")
    hold(index, blocks(5, 1), successor)
    assert [index.match(blocks(10 * number, 1)) for number in range(3)] == [{}, {B: 1}, {}]
    for number in range(3):
        hold(index, blocks(5 + number, 1), successor)
    assert index.pairs == 4


def test_a_removed_pod_is_cleared_by_later_requests(index: PrefixIndex) -> None:
    hold(index, blocks(5, 1), B)
    for number in range(3 * WORK):
        hold(index, blocks(10 * number + 10, 1), A)
    index.forget(A)
    for _ in range(2):
        index.reserve((blocks(5, 1),), B, CAPACITY)
    assert index.pairs == 1


def test_numbers_of_cleared_pods_are_reused(index: PrefixIndex) -> None:
    for number in range(100):
        passing = Endpoint(f"pod-{number}")
        hold(index, blocks(1, 5), passing)
        assert index.match(blocks(1, 5)) == {passing: 5}
        index.forget(passing)
    assert index.bytes < 5000


def test_a_reservation_on_a_removed_pod_is_void(index: PrefixIndex) -> None:
    confirmed, released = (index.reserve((blocks(1, 5),), A, CAPACITY) for _ in range(2))
    index.forget(A)
    hold(index, blocks(1, 3), A)
    index.confirm(confirmed)
    index.release(released)
    assert index.match(blocks(1, 5)) == {A: 3}


def test_removing_an_unknown_pod_changes_nothing(index: PrefixIndex) -> None:
    hold(index, blocks(1, 5), A)
    index.forget(B)
    assert index.match(blocks(1, 5)) == {A: 5}


def test_the_version_changes_with_the_matches_and_not_by_matching(index: PrefixIndex) -> None:
    empty = index.version
    reservation = index.reserve((blocks(1, 5),), A, CAPACITY)
    reserved = index.version
    index.match(blocks(1, 5))
    assert index.version == reserved
    index.release(reservation)
    released = index.version
    hold(index, blocks(1, 5), A)
    held = index.version
    index.forget(A)
    assert empty < reserved < released < held < index.version


def test_the_version_stays_while_requests_use_known_blocks(index: PrefixIndex) -> None:
    for length in (2, 5):
        hold(index, blocks(1, length), A)
    version = index.version
    for length in (2, 5):
        hold(index, blocks(1, length), A)
        index.release(index.reserve((blocks(1, length),), A, CAPACITY))
    assert index.version == version


def test_the_version_changes_when_siblings_close_provisional_blocks_and_when_they_open(index: PrefixIndex) -> None:
    riders = [index.reserve((blocks(1, 5),), A, CAPACITY) for _ in range(15)]
    before = index.version
    riders.append(index.reserve((blocks(1, 5),), A, CAPACITY))
    closed = index.version
    index.confirm(riders.pop())
    assert before < closed < index.version


def test_a_request_whose_blocks_are_truncated_in_flight_frees_all(index: PrefixIndex) -> None:
    hold(index, blocks(1, 8), A, 10)
    long_one = index.reserve((blocks(1, 8),), A, 10)
    short_one = index.reserve((blocks(1, 3),), A, 10)
    index.confirm(long_one)
    index.confirm(short_one)
    hold(index, blocks(11, 10), A, 10)
    assert (index.match(blocks(1, 8)), index.match(blocks(11, 10))) == ({}, {A: 10})


def test_blocks_of_a_long_request_are_recently_used_at_its_end(index: PrefixIndex) -> None:
    hold(index, blocks(1, 3), A, 10)
    long_one = index.reserve((blocks(1, 3),), A, 10)
    hold(index, blocks(11, 4), A, 10)
    hold(index, blocks(21, 4), A, 10)
    assert [index.match(blocks(start, 4)) for start in (1, 11, 21)] == [{A: 3}, {A: 3}, {A: 4}]
    index.confirm(long_one)
    hold(index, blocks(31, 6), A, 10)
    assert [index.match(blocks(start, 4)) for start in (1, 11, 21)] == [{A: 3}, {}, {A: 1}]


def report(index: PrefixIndex, cached: int, length: int = 10, prompt_tokens: int = 1000) -> bool:
    reservation = index.reserve((blocks(1, length),), A, CAPACITY)
    kept = index.observe(reservation, prompt_tokens, cached)
    index.confirm(reservation)
    return kept


def test_predictions_are_compared_with_the_reports_of_the_engine(index: PrefixIndex) -> None:
    assert report(index, cached=0)
    assert index.prediction_error(A) == 0
    assert report(index, cached=900)
    assert index.prediction_error(A) == 100 / 1950
    assert index.prediction_error(B) == 0


def test_a_pod_that_keeps_missing_predicted_hits_is_cleared(index: PrefixIndex) -> None:
    hold(index, blocks(1, 10), A)
    assert [report(index, cached=0) for _ in range(3)] == [True, True, False]
    assert index.match(blocks(1, 10)) == {}


def test_a_single_hit_ends_the_suspicion(index: PrefixIndex) -> None:
    hold(index, blocks(1, 10), A)
    assert all(report(index, cached) for cached in (0, 0, 500, 0, 0))


def test_unconfirmed_blocks_are_not_predicted(index: PrefixIndex) -> None:
    siblings = [index.reserve((blocks(1, 10),), A, CAPACITY) for _ in range(5)]
    for sibling in siblings:
        assert index.observe(sibling, 1000, 0)
        index.confirm(sibling)
    assert index.prediction_error(A) == 0


def test_predictions_weight_a_hash_by_its_blocks(index: PrefixIndex) -> None:
    hold(index, blocks(1, 96), A)
    report(index, cached=0, length=128, prompt_tokens=256 * 64)
    assert index.prediction_error(A) == 128 * 64 / (256 * 64)


def test_short_prompts_prove_nothing(index: PrefixIndex) -> None:
    assert all(report(index, cached=0, length=3, prompt_tokens=150) for _ in range(10))
