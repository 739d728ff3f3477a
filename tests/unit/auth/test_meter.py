"""Buckets that refill and budgets of a day."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth.meter import SECONDS_PER_DAY, Bucket, DailyBudget
from proxy.core.ports import ManualClock


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 50)), max_size=60))
def test_no_more_is_granted_than_was_there_and_refilled(most: int, requested: list[tuple[float, float]]) -> None:
    now, got = 0.0, 0.0
    bucket = Bucket(most, now)
    for pause, amount in requested:
        now += pause
        amount = min(amount, most)
        if bucket.wait(amount, now) == 0.0:
            bucket.charge(amount, now)
            got += amount
        assert got <= most + most * now / 60 + 1e-6


@given(st.integers(1, 100), st.floats(0.1, 100), st.floats(0, 100))
def test_waiting_for_the_stated_time_suffices(most: int, taken: float, requested: float) -> None:
    bucket = Bucket(most, 0.0)
    bucket.charge(taken, 0.0)
    wait = bucket.wait(requested, 0.0)
    assert bucket.wait(requested, wait + 1e-6) <= 1e-6


def test_returned_amounts_can_be_used_and_overdrafts_are_owed() -> None:
    bucket = Bucket(60, 0.0)
    bucket.charge(80, 0.0)
    assert bucket.wait(1, 0.0) == 21.0
    bucket.charge(-30, 0.0)
    assert bucket.wait(1, 0.0) == 0.0
    assert bucket.full_in(0.0) == 50.0


def test_a_day_starts_at_midnight() -> None:
    clock = ManualClock(wall=20_000 * SECONDS_PER_DAY + SECONDS_PER_DAY / 2)
    day = DailyBudget(100, clock.wall, clock.now())
    day.charge(99, clock.now())
    assert day.wait(50, clock.now()) == 0.0
    day.charge(50, clock.now())
    assert day.wait(1, clock.now()) == SECONDS_PER_DAY / 2
    clock.advance(SECONDS_PER_DAY / 2)
    assert day.wait(1, clock.now()) == 0.0


class SetClock(ManualClock):
    """Its wall clock can be set, as an operator or NTP does."""

    def set_wall(self, seconds: float) -> None:
        self._wall_offset += seconds


def used_up(hour: float = 12.0) -> tuple[SetClock, DailyBudget]:
    """Return a spent budget at this hour."""
    clock = SetClock(now=1e6, wall=20_000 * SECONDS_PER_DAY + 3600 * hour)
    day = DailyBudget(100, clock.wall, clock.now())
    day.charge(100, clock.now())
    return clock, day


@pytest.mark.parametrize("back", [3600 * 13, 5 * SECONDS_PER_DAY, 20_000 * SECONDS_PER_DAY])
def test_a_budget_is_not_granted_again_when_the_clock_is_set_back_and_corrected(back: float) -> None:
    clock, day = used_up()
    clock.set_wall(-back)
    assert day.wait(1, clock.now()) > 0.0
    clock.set_wall(back)
    assert day.wait(1, clock.now()) == SECONDS_PER_DAY / 2
    clock.advance(SECONDS_PER_DAY / 2)
    assert day.wait(1, clock.now()) == 0.0


@pytest.mark.parametrize("back", [3600, 5 * SECONDS_PER_DAY, 20_000 * SECONDS_PER_DAY])
def test_a_budget_is_granted_again_within_a_day_though_the_clock_was_set_back_for_good(back: float) -> None:
    clock, day = used_up()
    clock.set_wall(-back)
    wait = day.wait(1, clock.now())
    assert 0.0 < wait <= SECONDS_PER_DAY
    clock.advance(wait)
    assert day.wait(1, clock.now()) == 0.0


def test_a_budget_of_a_clock_that_was_wrong_by_years_ends_within_a_day_of_its_correction() -> None:
    clock, day = used_up()
    clock.set_wall(3650 * SECONDS_PER_DAY)
    assert day.wait(1, clock.now()) == 0.0
    day.charge(100, clock.now())
    clock.set_wall(-3650 * SECONDS_PER_DAY)
    assert 0.0 < day.wait(1, clock.now()) <= SECONDS_PER_DAY
    clock.advance(SECONDS_PER_DAY)
    assert day.wait(1, clock.now()) == 0.0


def test_two_processes_do_not_carry_the_usage_of_a_day_into_the_next_one() -> None:
    """Each reports its usage to the other every second; the wall clock of one is half a minute behind."""
    clock, day = used_up(hour=23.9)
    behind = SetClock(now=1e6, wall=clock.wall() - 30)
    late = DailyBudget(100, behind.wall, behind.now())
    late.at_least(day.used(clock.now()), behind.now())
    for _ in range(1000):
        clock.advance(1.0)
        behind.advance(1.0)
        day.at_least(late.used(behind.now()), clock.now())
        late.at_least(day.used(clock.now()), behind.now())
    assert (day.used(clock.now()), late.used(behind.now())) == (0.0, 0.0)
    day.charge(7, clock.now())
    late.at_least(day.used(clock.now()), behind.now())
    assert late.used(behind.now()) == 7
