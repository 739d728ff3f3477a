"""A pod's weight is its share of the traffic where nothing else decides."""

from collections import Counter
from math import inf, log

import pytest

from proxy.core.endpoint import Endpoint, update
from tests.helpers.scheduling.situations import pod, request, scheduling


def traffic(picker: str, pods: list[Endpoint], count: int) -> Counter[str]:
    """Each request is one unit of work, kept as the ledger keeps it: the log of work per weight."""
    built = scheduling({"plugins": [{"type": "queue-scorer"}, {"type": picker}]})
    sent: Counter[str] = Counter()
    for _ in range(count):
        target = built.scheduler.schedule(request(), pods).target
        sent[target.name] += 1
        update(target.load, recent=log(sent[target.name] / target.weight))
    return sent


def test_equal_scores_with_weights_3_to_1_give_3_to_1_exactly() -> None:
    pods = [pod("heavy", weight=3.0, recent=-inf), pod("light", recent=-inf)]
    assert traffic("max-score-picker", pods, 400) == {"heavy": 300, "light": 100}


@pytest.mark.parametrize("picker", ["random-picker", "weighted-random-picker"])
def test_random_pickers_give_3_to_1_on_average(picker: str) -> None:
    sent = traffic(picker, [pod("heavy", weight=3.0), pod("light")], 4000)
    assert sent["heavy"] / sent["light"] == pytest.approx(3, rel=0.15)


def test_without_weights_the_order_has_no_preference() -> None:
    sent = traffic("max-score-picker", [pod(name, recent=-inf) for name in "abcd"], 400)
    assert sent == dict.fromkeys("abcd", 100)
