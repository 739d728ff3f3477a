"""Metrics that grow are carried on; noise and what falls are not."""

from __future__ import annotations

import random

import pytest

from proxy.autoscale.outlook import FEWEST, Outlook, trend
from proxy.autoscale.policy import Role
from proxy.autoscale.total import Metric, Sized

SUM, LEVEL = Metric("load", "total", 0.8), Metric("usage", "value", 0.8)


def seen(value: object, name: str = "load") -> Sized:
    return Sized(Role("decode", 1, 20, current=4, ready=4), {name: value})


def carried(values: list[object], metric: Metric = SUM, seconds: float = 120.0) -> object:
    """The last of the values that came every 15 seconds, as it will be."""
    outlook, found = Outlook(), None
    for at, value in enumerate(values):
        found = outlook.ahead(15.0 * at, seen(value, metric.name), [metric], seconds).metrics[metric.name]
    return found


def test_what_grows_is_where_it_will_be() -> None:
    assert carried([1.0 + 0.15 * at for at in range(20)]) == pytest.approx(1.0 + 0.15 * 19 + 0.01 * 120)


def test_what_falls_is_what_it_is() -> None:
    assert carried([9.0 - 0.1 * at for at in range(20)]) == pytest.approx(9.0 - 0.1 * 19)


def test_noise_has_next_to_no_trend() -> None:
    rng = random.Random(1)
    points = [[(15.0 * at, rng.gauss(4.0, 0.4)) for at in range(16)] for _ in range(200)]
    assert sum(trend(one) for one in points) / len(points) * 120 < 0.03 * 4.0


def test_a_few_readings_are_no_trend() -> None:
    assert carried([1.0 * at for at in range(FEWEST - 1)]) == FEWEST - 2


def test_a_jump_is_not_carried_on_for_ever() -> None:
    values: list[object] = [*[1.0] * 20, *[4.0] * 20]
    assert carried(values) == 4.0


def test_levels_are_left_alone() -> None:
    assert carried([0.1 * at for at in range(10)], LEVEL) == pytest.approx(0.9)


def test_values_of_replicas_grow_in_proportion() -> None:
    found = carried([[0.1 * at, 0.3 * at] for at in range(1, 20)], seconds=15.0)
    assert found == pytest.approx([2.0, 6.0])


@pytest.mark.parametrize("value", [None, float("nan"), [1.0, None], []])
def test_what_is_missing_stays_missing(value: object) -> None:
    assert carried([value] * 10) is value


def test_no_seconds_are_the_present() -> None:
    assert carried([1.0 * at for at in range(10)], seconds=0.0) == 9.0
