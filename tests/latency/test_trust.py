"""Trust in predictions is not given back and forth."""

from proxy.latency.trust import AGAIN, FIRST_PAUSE, MOST_PAUSE, Trust

GOOD, BAD = 0.1, 0.9


def pause(trust: Trust, judged: int) -> int:
    """Predictions until it is given again, all of them good."""
    return next(more for more in range(10 * MOST_PAUSE) if trust.judge(GOOD, judged + more))


def test_trust_is_lost_at_once_and_given_again_after_a_while_of_good_predictions() -> None:
    trust = Trust(0.5)
    assert not trust.judge(0.5, 20)
    assert trust.judge(BAD, 21)
    assert not trust.is_given
    assert not trust.judge(GOOD, 22)
    assert not trust.judge(AGAIN * 0.5, 21 + FIRST_PAUSE)
    assert trust.judge(GOOD, 22 + FIRST_PAUSE)
    assert trust.is_given


def test_each_time_that_trust_is_lost_soon_it_takes_twice_as_long_up_to_a_limit() -> None:
    trust, judged, pauses = Trust(0.5), 1_000, []
    for _ in range(10):
        assert trust.judge(BAD, judged)
        pauses.append(pause(trust, judged))
        judged += pauses[-1] + 1
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == MOST_PAUSE


def test_trust_that_was_kept_for_long_is_given_again_as_soon_as_the_first_time() -> None:
    trust = Trust(0.5)
    for judged in (1_000, 1_100):
        trust.judge(BAD, judged)
        trust.judge(GOOD, judged + 50)
    assert trust.judge(GOOD, 2_000)
    trust.judge(BAD, 10_000)
    assert pause(trust, 10_000) == FIRST_PAUSE
