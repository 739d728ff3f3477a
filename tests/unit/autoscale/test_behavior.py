"""How a total follows what is recommended, in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.autoscale.behavior import Behavior, Damping, Panic, ScaleDown, ScaleUp
from proxy.core.params import Duration

TICK = 15.0
WINDOW = 300.0
CALM = Panic(hold=Duration(0.0))
UNLIMITED = Behavior(ScaleUp(select="none"), ScaleDown(select="none", stabilization=Duration(WINDOW)), CALM)


def totals_of(behavior: Behavior, initial: int, recommended: Iterable[int]) -> list[int]:
    """Return the totals, tick by tick, of a fleet that scales at once."""
    damping, current, totals = Damping(), initial, []
    damping.start(0.0, initial)
    for tick, wanted in enumerate(recommended):
        current, _ = damping.correct(behavior, tick * TICK, current, wanted)
        totals.append(current)
    return totals


@given(
    st.integers(2, 40),
    st.lists(st.integers(1, 40), max_size=40),
    st.sampled_from(["or", "and", "none"]),
    st.sampled_from([0.0, 20.0, 300.0]),
)
def test_22_after_the_load_has_fallen_permanently_the_total_falls(
    initial: int, before: list[int], select: str, window: float
) -> None:
    """A history of corrected values in place of raw ones would hold itself up for ever."""
    down = ScaleDown(instances=4, percent=50, select=select, stabilization=Duration(window))  # type: ignore[arg-type]
    enough = 40 + int(window / TICK) + 40 * int(down.period / TICK)
    totals = totals_of(replace(UNLIMITED, scale_down=down), initial, [*before, *[1] * enough])
    assert totals[-1] == 1


def test_22_a_fall_from_ten_to_four_applies_after_the_window() -> None:
    totals = totals_of(UNLIMITED, 10, [10, *[4] * 30])
    assert totals[int(WINDOW / TICK)] == 10
    assert totals[int(WINDOW / TICK) + 1] == 4


def test_23_nothing_shrinks_in_the_first_window() -> None:
    totals = totals_of(UNLIMITED, 10, [2] * 30)
    assert set(totals[: int(WINDOW / TICK) + 1]) == {10}
    assert totals[-1] == 2


def test_a_short_peak_in_the_window_holds_the_total() -> None:
    assert totals_of(UNLIMITED, 4, [4, 8, *[4] * 20])[-1] == 8


def test_growth_must_be_recommended_for_the_whole_window() -> None:
    behavior = replace(UNLIMITED, scale_up=ScaleUp(select="none", stabilization=Duration(60.0)))
    assert totals_of(behavior, 2, [6] * 7) == [2, 2, 2, 2, 2, 6, 6]
    assert set(totals_of(behavior, 2, [6, 6, 2, 6, 6, 6])) == {2}


@pytest.mark.parametrize(("select", "most"), [("or", 20), ("and", 14), ("none", 50)])
def test_growth_per_period_is_limited(select: str, most: int) -> None:
    up = ScaleUp(4, 100, Duration(60.0), select)  # type: ignore[arg-type]
    totals = totals_of(replace(UNLIMITED, scale_up=up), 10, [50] * 4)
    assert totals == [most] * 4


def test_a_new_period_starts_after_the_old_one() -> None:
    up = ScaleUp(4, 0, Duration(60.0))
    totals = totals_of(replace(UNLIMITED, scale_up=up), 10, [50] * 12)
    assert totals == [14] * 5 + [18] * 5 + [22] * 2


@pytest.mark.parametrize("select", ["or", "and"])
def test_a_limit_whose_period_is_zero_does_not_apply(select: str) -> None:
    behavior = Behavior(
        ScaleUp(4, 100, Duration(0.0), select),  # type: ignore[arg-type]
        ScaleDown(1, 50, Duration(0.0), select, Duration(0.0)),  # type: ignore[arg-type]
        CALM,
    )
    assert totals_of(behavior, 10, [50, 1]) == [50, 1]


def test_by_default_half_of_the_replicas_and_at_least_one_may_be_removed_per_minute() -> None:
    down = ScaleDown(stabilization=Duration(0.0))
    totals = totals_of(replace(UNLIMITED, scale_down=down), 10, [1] * 22)
    assert totals == [5] * 5 + [3] * 5 + [2] * 5 + [1] * 7


class TestPanic:
    BEHAVIOR = replace(UNLIMITED, scale_up=ScaleUp(1, 0, Duration(60.0)), panic=Panic(hold=Duration(60.0)))

    def test_twice_the_current_total_is_applied_at_once(self) -> None:
        assert totals_of(self.BEHAVIOR, 4, [8]) == [8]
        assert totals_of(self.BEHAVIOR, 4, [7]) == [5]

    def test_nothing_is_removed_during_panic(self) -> None:
        behavior = replace(self.BEHAVIOR, scale_down=ScaleDown(select="none", stabilization=Duration(0.0)))
        assert totals_of(behavior, 4, [8, 2, 2, 2, 2, 2]) == [8, 8, 8, 8, 8, 2]

    def test_its_own_percentage_limits_it(self) -> None:
        slow = replace(self.BEHAVIOR, panic=Panic(hold=Duration(60.0), percent=100))
        assert totals_of(slow, 4, [40, 40]) == [8, 8]

    def test_its_own_percentage_does_not_apply_where_its_period_is_zero(self) -> None:
        fast = replace(self.BEHAVIOR, panic=Panic(hold=Duration(60.0), percent=100, period=Duration(0.0)))
        assert totals_of(fast, 4, [40]) == [40]

    def test_from_zero_it_grows(self) -> None:
        assert totals_of(self.BEHAVIOR, 0, [5]) == [5]

    def test_an_empty_idle_fleet_does_not_panic(self) -> None:
        assert Damping().correct(self.BEHAVIOR, 0.0, 0, 0) == (0, False)

    def test_without_a_hold_there_is_no_panic(self) -> None:
        assert Damping().correct(UNLIMITED, 0.0, 1, 30) == (30, False)
