"""What forecasts say counts as far as those before them were right."""

from __future__ import annotations

import math

import pytest

from proxy.autoscale.demand import MEMORY, ForecastConfidence


def after(came: float, result: float = 1.0, forecasts: int = 40, value: float = 5.0) -> ForecastConfidence:
    """The growth that came each time, two minutes after its forecast."""
    confidence = ForecastConfidence()
    for at in range(forecasts):
        now = 240.0 * at
        confidence.judge(now, value)
        confidence.say(now + 120, value, result)
        confidence.judge(now + 120, value + came)
    return confidence


def test_without_history_forecasts_are_trusted() -> None:
    assert ForecastConfidence().share(0.8) == 1.0


@pytest.mark.parametrize(("came", "share"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (-1.0, 0.0), (3.0, 1.0)])
def test_the_share_is_the_growth_over_the_forecast(came: float, share: float) -> None:
    assert after(came).share(0.1) == pytest.approx(share, abs=0.02)


def test_small_errors_have_little_weight() -> None:
    """A tenth of a replica each time is no reason for distrust."""
    assert after(0.0, result=0.08).share(0.8) > 0.9


def test_pending_forecasts_are_not_scored() -> None:
    confidence = ForecastConfidence()
    confidence.say(120.0, 5.0, 100.0)
    confidence.judge(119.0, 5.0)
    assert confidence.share(0.8) == 1.0
    confidence.judge(120.0, 5.0)
    assert confidence.share(0.8) < 0.01


def test_forecasts_without_a_value_are_dropped() -> None:
    confidence = ForecastConfidence()
    confidence.say(120.0, 5.0, 100.0)
    confidence.judge(120.0, None)
    confidence.judge(135.0, 5.0)
    assert confidence.share(0.8) == 1.0


def test_old_forecasts_are_dropped() -> None:
    confidence = after(0.0, result=2.0, forecasts=1)
    distrust = 1 - confidence.share(1.0)
    confidence.judge(120.0 + MEMORY, 5.0)
    assert distrust == pytest.approx(0.5)
    assert 1 - confidence.share(1.0) == pytest.approx(4 / math.e / (4 / math.e + 4))


def test_one_burst_does_not_outweigh_many_errors() -> None:
    confidence = after(0.0, forecasts=20)
    confidence.say(5000.0, 5.0, 1.0)
    confidence.judge(5000.0, 500.0)
    assert confidence.share(0.1) < 0.5


def test_forecasts_from_zero_are_distrusted_only_after_an_error() -> None:
    assert ForecastConfidence().share(0.0) == 1.0
    assert after(0.0).share(0.0) == 0.0
