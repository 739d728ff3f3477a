"""Buckets that refill and budgets of a day."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.auth.meter import SECONDS_PER_DAY, Bucket, Day
from proxy.core.ports import ManualClock


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 50)), max_size=60))
def test_nobody_gets_more_than_what_was_there_and_what_came_since(most: int, asked: list[tuple[float, float]]) -> None:
    now, got = 0.0, 0.0
    bucket = Bucket(most, now)
    for pause, amount in asked:
        now += pause
        amount = min(amount, most)
        if bucket.wait(amount, now) == 0.0:
            bucket.charge(amount, now)
            got += amount
        assert got <= most + most * now / 60 + 1e-6


@given(st.integers(1, 100), st.floats(0.1, 100), st.floats(0, 100))
def test_who_waits_as_long_as_he_is_told_gets_it(most: int, taken: float, asked: float) -> None:
    bucket = Bucket(most, 0.0)
    bucket.charge(taken, 0.0)
    wait = bucket.wait(asked, 0.0)
    assert bucket.wait(asked, wait + 1e-6) <= 1e-6


def test_what_is_given_back_can_be_taken_and_what_is_overdrawn_is_missing() -> None:
    bucket = Bucket(60, 0.0)
    bucket.charge(80, 0.0)
    assert bucket.wait(1, 0.0) == 21.0
    bucket.charge(-30, 0.0)
    assert bucket.wait(1, 0.0) == 0.0
    assert bucket.full_in(0.0) == 50.0


def test_a_day_begins_at_midnight() -> None:
    clock = ManualClock(wall=20_000 * SECONDS_PER_DAY + SECONDS_PER_DAY / 2)
    day = Day(100, clock.wall)
    day.charge(99, clock.now())
    assert day.wait(50, clock.now()) == 0.0
    day.charge(50, clock.now())
    assert day.wait(1, clock.now()) == SECONDS_PER_DAY / 2
    clock.advance(SECONDS_PER_DAY / 2)
    assert day.wait(1, clock.now()) == 0.0
