"""Metrics that grow are carried on; noise, what falls and what did not come true are not."""

from __future__ import annotations

import random

import pytest

from proxy.autoscale.demand import FEWEST, DemandForecast, Metric, SizedRole, trend
from proxy.autoscale.policy import Role

SUM, LEVEL = Metric("load", "total", 0.8), Metric("usage", "value", 0.8)


def seen(value: object, name: str = "load", ready: int = 20) -> SizedRole:
    return SizedRole(Role("decode", 1, 20, current=20, ready=ready), {name: value})


def carried(values: list[object], metric: Metric = SUM, seconds: float = 120.0, ready: int = 20) -> object:
    """The last of the values that came every 15 seconds, as it will be."""
    return carried_by(DemandForecast(), values, metric, seconds, ready)


def carried_by(outlook: DemandForecast, values: list[object], metric: Metric, seconds: float, ready: int) -> object:
    found = None
    for at, value in enumerate(values):
        found = outlook.ahead(15.0 * at, seen(value, metric.name, ready), [metric], seconds).metrics[metric.name]
    return found


def test_a_growing_sum_is_extrapolated() -> None:
    assert carried([1.0 + 0.15 * at for at in range(20)]) == pytest.approx(1.0 + 0.15 * 19 + 0.01 * 120)


def test_a_falling_sum_is_not_extrapolated() -> None:
    assert carried([9.0 - 0.1 * at for at in range(20)]) == pytest.approx(9.0 - 0.1 * 19)


def test_noise_has_almost_no_trend() -> None:
    rng = random.Random(1)
    points = [[(15.0 * at, rng.gauss(4.0, 0.4)) for at in range(16)] for _ in range(200)]
    assert sum(trend(one) for one in points) / len(points) * 120 < 0.03 * 4.0


def test_a_few_readings_are_no_trend() -> None:
    assert carried([1.0 * at for at in range(FEWEST - 1)]) == FEWEST - 2


def test_a_jump_is_not_extrapolated_forever() -> None:
    values: list[object] = [*[1.0] * 20, *[4.0] * 20]
    assert carried(values) == 4.0


def test_a_queue_for_replicas_is_not_extrapolated() -> None:
    """Four replicas have room for 3.2: the rest is a queue, which grows since they are too few."""
    full = [3.0] * 10
    queue = [3.5 + 0.5 * at for at in range(10)]
    assert carried([*full, *queue], ready=4) == queue[-1]
    assert carried([*full, *queue], ready=20) > queue[-1] + 0.02 * 120  # type: ignore[operator]


def test_the_earlier_trend_continues_at_full_capacity() -> None:
    """0.01 per second; full replicas do not show the growth."""
    rising, full = [2.0 + 0.15 * at for at in range(9)], [3.3] * 4
    assert carried([*rising, *full], ready=4) == pytest.approx(rising[-1] + 0.01 * (4 * 15 + 120))
    assert carried([*rising, *[3.3] * 30], ready=4) == 3.3


def test_without_replicas_nothing_is_served() -> None:
    assert carried([1.0 * at for at in range(1, 10)], ready=0) == 9.0


def test_wrong_forecasts_reduce_later_ones() -> None:
    """Every ten minutes it grows for two minutes, and falls back."""
    waves: list[object] = [2.0 + 0.2 * min(at % 40, 8) * (at % 40 < 12) for at in range(6 * 40 + 9)]
    first, last = carried(waves[-40:]), carried(waves)
    assert last < first - 0.5  # type: ignore[operator]


def test_levels_are_not_extrapolated() -> None:
    assert carried([0.1 * at for at in range(10)], LEVEL) == pytest.approx(0.9)


def test_values_of_replicas_grow_in_proportion() -> None:
    found = carried([[0.1 * at, 0.3 * at] for at in range(1, 20)], seconds=15.0)
    assert found == pytest.approx([2.0, 6.0])


@pytest.mark.parametrize("value", [None, float("nan"), [1.0, None], []])
def test_missing_values_stay_missing(value: object) -> None:
    assert carried([value] * 10) is value


def test_zero_seconds_give_the_present() -> None:
    assert carried([1.0 * at for at in range(10)], seconds=0.0) == 9.0
