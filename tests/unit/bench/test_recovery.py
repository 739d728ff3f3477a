"""Pods that were slow, as the whole router sees them."""

from bench.placement.experiment import Experiment
from bench.placement.scenario import Scenario
from bench.recovery import Trouble, outcomes

SEEDS = 3
SPARSE = Experiment(Scenario(pods=3), generator="2000+20", requests=900, seeds=SEEDS, known_capacity=4.0)


def recent_requests(trouble: Trouble) -> float:
    """Return how many of the last 300 requests went to pod 0, of three pods; the mean of some runs, which differ by
    chance."""
    runs = [outcomes(SPARSE, trouble, 1.0, "default", seed)[-300:] for seed in range(SEEDS)]
    return sum(one.pod == 0 for run in runs for one in run) / SEEDS


def test_an_avoided_pod_that_recovers_gets_its_share_again() -> None:
    assert recent_requests(Trouble(20.0)) > 30


def test_a_permanently_slow_pod_gets_few_requests() -> None:
    assert recent_requests(Trouble(20.0, stays=True)) < 15
