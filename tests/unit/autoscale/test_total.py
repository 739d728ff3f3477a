"""What metrics ask for, before any damping."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.autoscale.demand import MOST, Metric, SizedRole, demands, desired, desired_of_role, joined, total_of_all
from proxy.autoscale.policy import Role

QUEUE = Metric("queue", "avg", 5.0)
LEVEL = Metric("kv", "value", 0.8)
BACKLOG = Metric("backlog", "total", 1.5)


def sized(
    name: str, current: int, ready: int | None = None, low: int = 1, high: int = 20, **metrics: object
) -> SizedRole:
    return SizedRole(Role(name, low, high, current=current, ready=ready), metrics)


@given(st.integers(1, 50), st.floats(0.9, 1.1), st.sampled_from([QUEUE, LEVEL]))
def test_24_within_the_tolerance_of_the_mean_nothing_changes(count: int, part: float, metric: Metric) -> None:
    """Pods are not added up before they are compared with the target of one."""
    assert desired(metric, [metric.target * part] * count, count, 0.1) == count


def test_24_four_pods_just_above_the_target_stay_four() -> None:
    assert desired(QUEUE, [5.25] * 4, 4, 0.1) == 4


@given(st.integers(0, 1000))
def test_25_a_level_at_its_target_keeps_any_count(count: int) -> None:
    assert desired(LEVEL, 0.8, count, 0.0) == max(count, 1)


@pytest.mark.parametrize(("level", "wanted"), [(0.79, 8), (0.8, 8), (0.4, 4), (1.2, 12)])
def test_a_level_is_no_sum(level: float, wanted: int) -> None:
    """Taken for a sum, any of these would ask for one or two of eight replicas."""
    assert desired(LEVEL, level, 8, 0.0) == wanted


def test_replicas_that_start_count_as_idle_on_the_way_up() -> None:
    assert desired(LEVEL, 0.96, 8, 0.1, ready=4) == 8
    assert desired(LEVEL, 0.96, 4, 0.1, ready=4) == 5


def test_replicas_that_start_do_not_count_on_the_way_down() -> None:
    assert desired(QUEUE, [1.0] * 4, 6, 0.1) == 1


def test_a_ready_replica_without_a_value_counts_as_on_target_on_the_way_down() -> None:
    assert desired(QUEUE, [1.0, 1.0, None, None], 4, 0.1) == 3


def test_silent_replicas_that_would_reverse_the_direction_hold_the_size() -> None:
    assert desired(QUEUE, [6.0, 6.0], 2, 0.1) == 3
    assert desired(QUEUE, [6.0, 6.0, None, None], 2, 0.1) == 2


def test_six_pods_with_four_ready_and_idle_shrink() -> None:
    assert desired(QUEUE, [2.0] * 4, 6, 0.1) == 2


def test_without_ready_replicas_a_level_has_no_effect() -> None:
    assert desired(LEVEL, 0.9, 4, 0.1, ready=0) == 4


def test_from_zero_a_level_needs_one_at_once() -> None:
    assert desired(LEVEL, 0.3, 0, 0.1) == 1
    assert desired(LEVEL, 0.0, 0, 0.1) == 0


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1.0, True, "3"])
def test_an_invalid_reading_is_missing_and_not_zero(value: object) -> None:
    assert desired(LEVEL, value, 4, 0.1) is None
    assert desired(BACKLOG, value, 4, 0.1) is None
    assert desired(QUEUE, [value], 4, 0.1) is None


def test_rounding_errors_add_no_replica() -> None:
    assert desired(Metric("m", "total", 0.3), 2.1, 1, 0.0) == 7
    assert desired(Metric("m", "total", 0.3), 2.1001, 1, 0.0) == 8


def test_no_metric_exceeds_the_maximum() -> None:
    assert desired(Metric("m", "total", 1e-300), 1e300, 1, 0.1) == MOST


def test_a_sum_with_missing_parts_is_completed() -> None:
    assert desired(Metric("kv", "total", 0.8), [0.8, 0.8, None, None], 4, 0.1) == 4


def test_the_metric_with_the_most_replicas_decides() -> None:
    metrics = (QUEUE, BACKLOG)
    assert desired_of_role(sized("prefill", 4, queue=[5.0] * 4, backlog=9.0), metrics, 0.1) == 6


def test_a_role_with_a_missing_metric_does_not_shrink() -> None:
    metrics = (QUEUE, BACKLOG)
    assert desired_of_role(sized("prefill", 4, queue=[1.0] * 4, backlog=None), metrics, 0.1) == 4
    assert desired_of_role(sized("prefill", 4, queue=[10.0] * 4, backlog=None), metrics, 0.1) == 8
    assert desired_of_role(sized("prefill", 4, queue=[1.0] * 4, backlog=0.5), metrics, 0.1) == 1


def test_a_role_out_of_its_bounds_is_corrected_with_any_metrics() -> None:
    assert desired_of_role(sized("prefill", 1, low=3), (QUEUE,), 0.1) == 3
    assert desired_of_role(sized("prefill", 30), (QUEUE,), 0.1) == 20


def test_a_role_of_a_fixed_size_needs_no_metrics() -> None:
    assert desired_of_role(sized("prefill", 1, low=4, high=4), (), 0.1) == 4


def test_a_role_without_readings_keeps_its_size() -> None:
    metrics = {"prefill": (BACKLOG,), "decode": (LEVEL,)}
    fleet = [sized("prefill", 2, backlog=6.0), sized("decode", 7, kv=None)]
    assert demands(fleet, metrics, 0.1) == [4, 7]


def test_without_any_reading_there_is_no_total() -> None:
    fleet = [sized("prefill", 2), sized("decode", 7, kv=math.nan), sized("encode", 1, low=1, high=1)]
    assert demands(fleet, {"prefill": (BACKLOG,), "decode": (LEVEL,)}, 0.1) is None


def test_roles_of_fixed_sizes_alone_have_a_total() -> None:
    assert demands([sized("encode", 1, low=2, high=2)], {}, 0.1) == [2]


class TestAllRolesAsOne:
    def test_sums_are_added_and_levels_are_averaged_over_replicas(self) -> None:
        assert joined("total", [(100, 3), (200, 1)]) == 300
        assert joined("value", [(60, 3), (70, 1)]) == 62.5
        assert joined("avg", [([1, 2], 2), ([3], 1)]) == [1, 2, 3]

    def test_the_total_is_that_of_one_fleet(self) -> None:
        fleet = [sized("prefill", 2, kv=0.8), sized("decode", 6, kv=1.6)]
        assert total_of_all(fleet, (LEVEL,), 0.1) == 14

    def test_a_role_without_a_metric_is_excluded_from_it(self) -> None:
        fleet = [sized("prefill", 4, backlog=3.0), sized("decode", 6)]
        assert total_of_all(fleet, (BACKLOG,), 0.1) == 2

    def test_the_total_does_not_shrink_while_a_metric_of_a_role_is_missing(self) -> None:
        fleet = [sized("prefill", 4, kv=0.1), sized("decode", 6, kv=None)]
        assert total_of_all(fleet, (LEVEL,), 0.1) == 10

    def test_without_a_metric_there_is_no_total(self) -> None:
        assert total_of_all([sized("prefill", 4), sized("decode", 6)], (LEVEL,), 0.1) is None


class TestSpare:
    """What is near a whole number stays above it, so that it does not go to and fro."""

    @pytest.mark.parametrize(("value", "wanted"), [(3.2, 4), (2.9, 4), (2.2, 3), (1.2, 2), (0.1, 1), (0.0, 0)])
    def test_a_sum_shrinks_if_three_quarters_remain(self, value: float, wanted: int) -> None:
        assert desired(Metric("m", "total", 1.0), value, 4, 0.1, spare=0.75) == wanted

    def test_spare_applies_to_values_and_levels(self) -> None:
        assert desired(QUEUE, [2.5] * 4, 4, 0.1, spare=0.5) == 3
        assert desired(QUEUE, [3.0] * 4, 4, 0.1, spare=0.5) == 3
        assert desired(QUEUE, [3.0] * 4, 4, 0.1, spare=0.75) == 4
        assert desired(LEVEL, 0.4, 4, 0.1, spare=0.5) == 3
        assert desired(LEVEL, 0.4, 4, 0.1) == 2

    def test_spare_does_not_apply_on_the_way_up(self) -> None:
        assert desired(Metric("m", "total", 1.0), 4.6, 4, 0.1, spare=0.75) == 5

    def test_missing_values_stay_missing(self) -> None:
        assert desired(LEVEL, None, 4, 0.1, spare=0.75) is None
        assert desired(QUEUE, [None, 1.0], 4, 0.1, spare=0.75) is not None

    def test_all_roles_together_keep_spare_once(self) -> None:
        fleet = [sized("prefill", 4, load=1.0), sized("decode", 6, load=4.0)]
        assert total_of_all(fleet, (Metric("load", "total", 1.0),), 0.1) == 5
        assert total_of_all(fleet, (Metric("load", "total", 1.0),), 0.1, 0.75) == 6
