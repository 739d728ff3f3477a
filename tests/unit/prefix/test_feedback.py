import pytest

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.prefix.hashing import Chain, Turn
from proxy.prefix.index import PrefixIndex

ROOM = 1 << 40
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
    """A request of a second, of which the engine may report how many blocks it had cached."""
    reservation = index.reserve((chain,), A, ROOM)
    clock.advance(1)
    kept = cached_blocks is None or index.observe(reservation, 100 * len(chain), round(100 * cached_blocks))
    index.settle(reservation, True)
    return kept


def held(index: PrefixIndex, *starts: int) -> list[int]:
    return [index.match(blocks(start, 10)).get(A, 0) for start in starts]


def fill(index: PrefixIndex, clock: ManualClock, *starts: int) -> None:
    for start in starts:
        serve(index, clock, blocks(start, 10))


def test_what_is_older_than_two_losses_is_gone_and_what_is_newer_is_not(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400, 500)
    serve(index, clock, blocks(300, 10), cached_blocks=0)
    assert held(index, 100, 200, 300, 400, 500) == [10] * 5, "the word of one answer is not taken"
    serve(index, clock, blocks(400, 10), cached_blocks=0)
    fill(index, clock, 600)
    assert held(index, 100, 200, 300, 400, 500) == [0, 0, 10, 10, 10]


def test_something_older_that_is_found_clears_the_suspicion(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    serve(index, clock, blocks(300, 10), cached_blocks=0)
    serve(index, clock, blocks(200, 10), cached_blocks=10)
    serve(index, clock, blocks(400, 10), cached_blocks=0)
    fill(index, clock, 600)
    assert held(index, 100) == [10]


def test_something_newer_that_is_found_does_not(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    serve(index, clock, blocks(200, 10), cached_blocks=0)
    serve(index, clock, blocks(400, 10), cached_blocks=10)
    serve(index, clock, blocks(300, 10), cached_blocks=0)
    fill(index, clock, 600)
    assert held(index, 100) == [0]


def test_a_template_that_changes_the_end_of_the_past_dates_nothing(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    for start in (300, 400, 200):
        serve(index, clock, blocks(start, 10), cached_blocks=6)
    fill(index, clock, 600)
    assert held(index, 100, 200, 300, 400) == [10] * 4


def test_a_prefix_that_others_keep_warm_does_not_date_the_rest(index: PrefixIndex, clock: ManualClock) -> None:
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


def test_a_batch_of_prompts_tells_no_age(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300)
    for _ in range(2):
        reservation = index.reserve((blocks(200, 10), blocks(300, 10)), A, ROOM)
        clock.advance(1)
        index.observe(reservation, 2000, 500)
        index.settle(reservation, True)
    fill(index, clock, 600)
    assert held(index, 100) == [10]


def test_doubt_takes_the_longest_unused_share_and_nothing_in_use(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100, 200, 300, 400)
    running = index.reserve((blocks(100, 10),), A, ROOM)
    index.doubt(A, 0.6)
    fill(index, clock, 600)
    assert held(index, 100, 200, 300, 400) == [10, 0, 10, 10]
    index.doubt(A, -1.0)
    clock.advance(1)
    index.settle(running, True)
    assert held(index, 100, 300, 400, 600) == [10, 0, 0, 0]


def test_doubt_about_an_unknown_pod_changes_nothing(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100)
    index.doubt(B, 0.0)
    fill(index, clock, 600)
    assert held(index, 100) == [10]


def test_the_error_is_the_mean_difference_lately(index: PrefixIndex, clock: ManualClock) -> None:
    fill(index, clock, 100)
    serve(index, clock, blocks(100, 10), cached_blocks=5)
    assert index.prediction(A).error == pytest.approx(0.5)
    for _ in range(200):
        serve(index, clock, blocks(100, 10), cached_blocks=10)
    assert index.prediction(A).error < 0.01


def test_a_pod_has_no_room_for_prefixes_where_it_computes_answers(clock: ManualClock) -> None:
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


# Answers.

PROMPT = blocks(100, 10)
NEXT = PROMPT + blocks(200, 6)
TURN = Turn(PROMPT[-1], 10, 14, 4 * 256)


def say(index: PrefixIndex, tokens: int = 250, endpoint: Endpoint = A, capacity: int = ROOM) -> None:
    reservation = index.reserve((PROMPT,), endpoint, capacity)
    index.answered(reservation, tokens, -(-tokens // 64))
    index.settle(reservation, True)


def foreseen(index: PrefixIndex, turn: Turn = TURN) -> dict[Endpoint, int]:
    found = index.match(NEXT)
    index.add_answer(found, turn)
    return found


def go_on(index: PrefixIndex, cached_blocks: float) -> None:
    reservation = index.reserve((NEXT,), A, ROOM)
    index.go_on(reservation, TURN)
    index.observe(reservation, 1600, round(100 * cached_blocks))
    index.settle(reservation, True)


def test_the_pod_that_gave_the_answer_has_it_too(index: PrefixIndex) -> None:
    index.confirm(index.reserve((PROMPT,), B, ROOM))
    say(index)
    assert foreseen(index) == {A: 14, B: 10}


def test_of_a_question_that_was_asked_again_the_last_answer_counts(index: PrefixIndex) -> None:
    say(index)
    say(index, endpoint=B)
    assert foreseen(index) == {A: 10, B: 14}


def test_an_answer_that_is_shorter_in_the_prompt_than_it_was_is_not_expected(index: PrefixIndex) -> None:
    say(index, tokens=2000)
    assert foreseen(index) == {A: 10}


def test_an_answer_is_gone_with_its_prompt_or_its_pod(index: PrefixIndex) -> None:
    say(index, capacity=20)
    index.confirm(index.reserve((blocks(500, 12),), A, 20))
    assert foreseen(index) == {A: 8}
    say(index)
    index.forget(A)
    assert foreseen(index) == {}
    assert not index._forest.answers


def test_an_answer_takes_room_and_goes_before_its_prompt(index: PrefixIndex) -> None:
    say(index, capacity=24)
    index.confirm(index.reserve((blocks(500, 11),), A, 24))
    assert (foreseen(index), index.blocks(A)) == ({A: 10}, 21)


def test_an_answer_is_part_of_the_next_turn_once_that_is_computed(index: PrefixIndex) -> None:
    say(index)
    go_on(index, cached_blocks=14)
    assert index.match(NEXT) == {A: 16}
    assert not index._forest.answers


def test_a_failed_turn_leaves_the_answer(index: PrefixIndex) -> None:
    say(index)
    reservation = index.reserve((NEXT,), A, ROOM)
    index.go_on(reservation, TURN)
    index.release(reservation)
    assert foreseen(index) == {A: 14}


def test_a_prompt_that_is_held_in_part_has_no_answer(index: PrefixIndex) -> None:
    reservation = index.reserve((PROMPT,), A, 5)
    index.answered(reservation, 250, 4)
    index.confirm(reservation)
    assert foreseen(index) == {A: 5}


def test_the_answers_of_a_batch_are_nobodys(index: PrefixIndex) -> None:
    reservation = index.reserve((PROMPT, blocks(500, 3)), A, ROOM)
    index.answered(reservation, 250, 4)
    index.confirm(reservation)
    assert foreseen(index) == {A: 10}


def test_answers_that_are_never_found_again_are_not_expected_until_they_are(index: PrefixIndex) -> None:
    def turn(cached_blocks: float) -> int:
        say(index)
        expected = foreseen(index)[A]
        go_on(index, cached_blocks)
        index._forest.drop(pod := index._pods[A], next(h for s, h in pod.held.items() if s.start == 10))
        return expected

    assert turn(10) == 14
    assert [turn(10) for _ in range(20)][-1] == 10
    assert [turn(14) for _ in range(20)][-1] == 14


def test_an_answer_that_is_expected_is_part_of_the_prediction(index: PrefixIndex) -> None:
    say(index)
    go_on(index, cached_blocks=14)
    assert index.prediction(A).predicted_tokens == pytest.approx(1400)
    assert index.prediction(A).error == pytest.approx(0)


def test_the_version_changes_with_new_answers_only(index: PrefixIndex) -> None:
    say(index)
    before = index.version
    say(index)
    assert index.version == before
    say(index, tokens=300)
    assert index.version > before
