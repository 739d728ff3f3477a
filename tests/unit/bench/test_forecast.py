from __future__ import annotations

import math
from random import Random

import pytest

from bench.placement.forecast import Forecast
from proxy.lab.engine import CountingEngine
from tests.helpers.bench.support import crowd, sequence


def foreseen_and_seen(seed: int) -> tuple[float, float, bool]:
    """When the last of a crowd should have its first token, when it had it, and whether anybody was pre-empted."""
    jobs, config = crowd(Random(seed), blocks=2_000)
    engine = CountingEngine(config)
    submitted, forecast, seen, before = 0, math.inf, math.inf, 0
    while submitted < len(jobs) or engine.busy:
        arrival = jobs[submitted].arrival if submitted < len(jobs) else math.inf
        if arrival < engine.until:
            newcomer = sequence(submitted, jobs[submitted])
            if submitted == len(jobs) - 1:
                forecast, before = Forecast(engine, newcomer, arrival).first_token(), engine.preemptions
            engine.submit(newcomer, arrival)
            submitted += 1
            continue
        now = engine.until
        if any(event.first and event.sequence.index == len(jobs) - 1 for event in engine.finish()):
            seen = now
    return forecast, seen, engine.preemptions > before


def test_the_first_token_comes_at_its_predicted_time_unless_a_request_is_preempted() -> None:
    runs = [foreseen_and_seen(seed) for seed in range(200)]
    calm = [(forecast, seen) for forecast, seen, preempted in runs if not preempted]
    exact = sum(forecast == pytest.approx(seen, abs=1e-6) for forecast, seen in calm)
    assert len(calm) > 150
    assert exact >= 0.95 * len(calm)


def test_a_forecast_changes_nothing() -> None:
    jobs, config = crowd(Random(5))
    engine = CountingEngine(config)
    for index, job in enumerate(jobs[:-1]):
        engine.submit(sequence(index, job), 0.0)
    engine.finish()
    until, used, waiting = engine.until, engine.pool.used, list(engine.waiting)
    newcomer = sequence(len(jobs), jobs[-1])
    assert Forecast(engine, newcomer, until).first_token() == Forecast(engine, newcomer, until).first_token()
    assert (engine.until, engine.pool.used, list(engine.waiting)) == (until, used, waiting)
