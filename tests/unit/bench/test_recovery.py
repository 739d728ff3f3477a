"""Pods that were slow, as the whole router sees them."""

from bench.placement.experiment import Experiment
from bench.placement.scenario import Scenario
from bench.recovery import Trouble, outcomes

SPARSE = Experiment(Scenario(pods=3), generator="2000+20", requests=900, seeds=1, known_capacity=4.0)


def asked_of_late(trouble: Trouble) -> int:
    """How many of the last 300 requests went to pod 0."""
    return sum(one.pod == 0 for one in outcomes(SPARSE, trouble, 1.0, "default", 0)[-300:])


def test_a_pod_that_was_slow_and_that_nobody_asked_any_more_gets_its_part_again() -> None:
    assert asked_of_late(Trouble(20.0)) > 30


def test_a_pod_that_is_slow_to_the_end_is_asked_seldom() -> None:
    assert asked_of_late(Trouble(20.0, stays=True)) < 15
