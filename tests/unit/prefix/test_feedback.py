import pytest

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.prefix.hashing import Chain, ConversationTurn
from proxy.prefix.index import PrefixIndex

CAPACITY = 1 << 40
A, B = Endpoint("a"), Endpoint("b")


def blocks(start: int, length: int) -> Chain:
    return list(range(start, start + length))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def index(clock: ManualClock) -> PrefixIndex:
    return PrefixIndex(clock, max_siblings=16)


def serve(index: PrefixIndex, clock: ManualClock, chain: Chain, cached_blocks: float | None = None) -> bool:
    """A request of a second; the engine may report its cached blocks."""
    reservation = index.reserve((chain,), A, CAPACITY)
    clock.advance(1)
    kept = cached_blocks is None or index.observe(reservation, 100 * len(chain), round(100 * cached_blocks))
    index.settle(reservation, True)
    return kept


def held(index: PrefixIndex, *starts: int) -> list[int]:
    return [index.match(blocks(start, 10)).get(A, 0) for start in starts]


def fill(index: PrefixIndex, clock: ManualClock, *starts: int) -> None:
    for start in starts:
        serve(index, clock, blocks(start, 10))


def test_blocks_older_than_two_losses_are_dropped_and_newer_ones_stay(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400, 500)
    serve(index, clock, blocks(300, 10), cached_blocks=0)
    assert held(index, 100, 200, 300, 400, 500) == [10] * 5, "one response is not enough"
    serve(index, clock, blocks(400, 10), cached_blocks=0)
    fill(index, clock, 600)
    assert held(index, 100, 200, 300, 400, 500) == [0, 0, 10, 10, 10]


def test_finding_an_older_block_ends_the_suspicion(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    serve(index, clock, blocks(300, 10), cached_blocks=0)
    serve(index, clock, blocks(200, 10), cached_blocks=10)
    serve(index, clock, blocks(400, 10), cached_blocks=0)
    fill(index, clock, 600)
    assert held(index, 100) == [10]


def test_finding_a_newer_block_does_not(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    serve(index, clock, blocks(200, 10), cached_blocks=0)
    serve(index, clock, blocks(400, 10), cached_blocks=10)
    serve(index, clock, blocks(300, 10), cached_blocks=0)
    fill(index, clock, 600)
    assert held(index, 100) == [0]


def test_a_template_that_changes_earlier_turns_proves_nothing(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    for start in (300, 400, 200):
        serve(index, clock, blocks(start, 10), cached_blocks=6)
    fill(index, clock, 600)
    assert held(index, 100, 200, 300, 400) == [10] * 4


def test_a_prefix_kept_warm_by_others_does_not_date_the_rest(index: PrefixIndex, clock: ManualClock) -> None:
    """The system prompt is found, what only this conversation used is not: that is what tells the age."""
    system = blocks(1, 8)
    serve(index, clock, blocks(900, 10))
    for start in (100, 200):
        serve(index, clock, system + blocks(start, 8))
    serve(index, clock, system + blocks(300, 8))
    for start in (100, 200):
        serve(index, clock, system + blocks(start, 8), cached_blocks=8)
    fill(index, clock, 600)
    assert held(index, 900) == [0]
    assert index.match(system + blocks(300, 8)) == {A: 16}


def test_a_batch_of_prompts_shows_no_age(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300)
    for _ in range(2):
        reservation = index.reserve((blocks(200, 10), blocks(300, 10)), A, CAPACITY)
        clock.advance(1)
        index.observe(reservation, 2000, 500)
        index.settle(reservation, True)
    fill(index, clock, 600)
    assert held(index, 100) == [10]


def test_missing_hits_remove_the_longest_unused_share_and_nothing_in_use(
    index: PrefixIndex, clock: ManualClock
) -> None:
    fill(index, clock, 100, 200, 300, 400)
    running = index.reserve((blocks(100, 10),), A, CAPACITY)
    index.forget_share(A, 0.6)
    fill(index, clock, 600)
    assert held(index, 100, 200, 300, 400) == [10, 0, 10, 10]
    index.forget_share(A, -1.0)
    clock.advance(1)
    index.settle(running, True)
    assert held(index, 100, 300, 400, 600) == [10, 0, 0, 0]


def test_missing_hits_of_an_unknown_pod_change_nothing(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100)
    index.forget_share(B, 0.0)
    fill(index, clock, 600)
    assert held(index, 100) == [10]


def test_the_error_is_the_recent_mean_difference(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100)
    serve(index, clock, blocks(100, 10), cached_blocks=5)
    assert index.prediction_error(A) == pytest.approx(0.5)
    for _ in range(200):
        serve(index, clock, blocks(100, 10), cached_blocks=10)
    assert index.prediction_error(A) < 0.01


def test_responses_reduce_the_capacity_for_prefixes(clock: ManualClock) -> None:
    index = PrefixIndex(clock, max_siblings=16)
    pod = Endpoint("busy")
    for start in (100, 200, 300, 400):
        index.confirm(index.reserve((blocks(start, 10),), pod, 40))
    assert index.blocks(pod) == 40
    pod.publish(Metrics(kv_usage=0.5, freshness=Freshness.FRESH), 0)
    running = index.reserve((blocks(400, 10),), pod, 40)
    another = index.reserve((blocks(300, 10),), pod, 40)
    clock.advance(2)
    index.confirm(another)
    assert index.blocks(pod) == 30, "10 blocks in use, and half of 40 for the rest"
    clock.advance(2)
    index.confirm(running)
    assert index.blocks(pod) == 20


# Responses.

PROMPT = blocks(100, 10)
NEXT = PROMPT + blocks(200, 6)
TURN = ConversationTurn(PROMPT[-1], 10, 14, 4 * 256)


def say(index: PrefixIndex, tokens: int = 250, endpoint: Endpoint = A, capacity: int = CAPACITY) -> None:
    reservation = index.reserve((PROMPT,), endpoint, capacity)
    index.record_response(reservation, tokens, -(-tokens // 64))
    index.settle(reservation, True)


def foreseen(index: PrefixIndex, turn: ConversationTurn = TURN) -> dict[Endpoint, int]:
    found = index.match(NEXT)
    index.add_response(found, turn)
    return found


def go_on(index: PrefixIndex, cached_blocks: float) -> None:
    reservation = index.reserve((NEXT,), A, CAPACITY)
    index.note_turn(reservation, TURN)
    index.observe(reservation, 1600, round(100 * cached_blocks))
    index.settle(reservation, True)


def test_the_pod_of_the_response_has_it_cached(index: PrefixIndex) -> None:
    index.confirm(index.reserve((PROMPT,), B, CAPACITY))
    say(index)
    assert foreseen(index) == {A: 14, B: 10}


def test_for_a_repeated_prompt_the_last_response_counts(index: PrefixIndex) -> None:
    say(index)
    say(index, endpoint=B)
    assert foreseen(index) == {A: 10, B: 14}


def test_a_response_shorter_in_the_prompt_is_not_predicted(index: PrefixIndex) -> None:
    say(index, tokens=2000)
    assert foreseen(index) == {A: 10}


def test_a_response_is_dropped_with_its_prompt_or_pod(index: PrefixIndex) -> None:
    say(index, capacity=20)
    index.confirm(index.reserve((blocks(500, 12),), A, 20))
    assert foreseen(index) == {A: 8}
    say(index)
    index.forget(A)
    assert foreseen(index) == {}
    assert not index._forest.responses


def test_a_response_uses_capacity_and_is_evicted_before_its_prompt(index: PrefixIndex) -> None:
    say(index, capacity=24)
    index.confirm(index.reserve((blocks(500, 11),), A, 24))
    assert (foreseen(index), index.blocks(A)) == ({A: 10}, 21)


def test_a_response_is_part_of_the_next_turn_once_computed(index: PrefixIndex) -> None:
    say(index)
    go_on(index, cached_blocks=14)
    assert index.match(NEXT) == {A: 16}
    assert not index._forest.responses


def test_a_failed_turn_keeps_the_response(index: PrefixIndex) -> None:
    say(index)
    reservation = index.reserve((NEXT,), A, CAPACITY)
    index.note_turn(reservation, TURN)
    index.release(reservation)
    assert foreseen(index) == {A: 14}


def test_a_partly_cached_prompt_has_no_response(index: PrefixIndex) -> None:
    reservation = index.reserve((PROMPT,), A, 5)
    index.record_response(reservation, 250, 4)
    index.confirm(reservation)
    assert foreseen(index) == {A: 5}


def test_the_responses_of_a_batch_are_not_tracked(index: PrefixIndex) -> None:
    reservation = index.reserve((PROMPT, blocks(500, 3)), A, CAPACITY)
    index.record_response(reservation, 250, 4)
    index.confirm(reservation)
    assert foreseen(index) == {A: 10}


def test_responses_never_found_again_are_not_predicted_until_found(index: PrefixIndex) -> None:
    def turn(cached_blocks: float) -> int:
        say(index)
        expected = foreseen(index)[A]
        go_on(index, cached_blocks)
        index._forest.drop(pod := index._pods[A], next(h for s, h in pod.held.items() if s.start == 10))
        return expected

    assert turn(10) == 14
    assert [turn(10) for _ in range(20)][-1] == 10
    assert [turn(14) for _ in range(20)][-1] == 14


def test_a_predicted_response_is_part_of_the_prediction(index: PrefixIndex) -> None:
    say(index)
    go_on(index, cached_blocks=14)
    assert index.prediction_error(A) == pytest.approx(0)


def test_the_version_changes_with_new_responses_only(index: PrefixIndex) -> None:
    say(index)
    before = index.version
    say(index)
    assert index.version == before
    say(index, tokens=300)
    assert index.version > before
