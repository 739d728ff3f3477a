"""Trust in predictions is not given back and forth."""

from proxy.latency.trust import AGAIN, Trust

LIMIT = 0.5


def test_trust_is_lost_at_once_when_predictions_are_bad() -> None:
    trust = Trust(LIMIT)
    assert not trust.judge(LIMIT)
    assert trust.judge(LIMIT + 0.01)
    assert not trust.is_given


def test_trust_is_given_again_when_they_are_clearly_better() -> None:
    trust = Trust(LIMIT)
    trust.judge(0.9)
    assert not trust.judge(LIMIT)
    assert not trust.judge(AGAIN * LIMIT)
    assert trust.judge(AGAIN * LIMIT - 0.01)
    assert trust.is_given
