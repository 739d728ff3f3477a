from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.metrics import Counter, Family, Histogram, edges_of

BOUNDS = (0.1, 1.0, 10.0)


def histogram() -> Histogram:
    return Histogram(BOUNDS, edges_of(BOUNDS))


def values_of(histogram: Histogram) -> dict[str, float]:
    return {
        sample.name + sample.labels.get("le", ""): sample.value for sample in histogram.samples("h", {"model": "m"})
    }


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    cell = histogram()
    cell.observe(1.0)
    assert values_of(cell) == {
        "h_bucket0.1": 0, "h_bucket1.0": 1, "h_bucket10.0": 1, "h_bucket+Inf": 1, "h_count": 1, "h_sum": 1.0
    }  # fmt: skip


@given(st.lists(st.floats(0, 100)))
def test_buckets_count_up_to_all_values(values: list[float]) -> None:
    cell = histogram()
    for value in values:
        cell.observe(value)
    exposed = values_of(cell)
    for bound in BOUNDS:
        assert exposed[f"h_bucket{bound}"] == bisect_left(sorted(values), bound) + values.count(bound)
    assert exposed["h_bucket+Inf"] == exposed["h_count"] == len(values)
    assert exposed["h_sum"] == pytest.approx(sum(values))


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS)))
def test_many_values_at_once_are_each_observed(values: list[float]) -> None:
    one_by_one, at_once = histogram(), histogram()
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(values[:3])
    at_once.observe_all(values[3:])
    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)


def test_a_cell_is_bound_once_per_label_values() -> None:
    family = Family("f", "counter", "help", ("a",), Counter)
    assert family.cell("x") is family.cell("x")
    assert family.cell("x") is not family.cell("y")


def test_a_cell_with_the_wrong_number_of_label_values_is_refused() -> None:
    with pytest.raises(ValueError, match="f has the labels"):
        Family("f", "counter", "help", ("a",), Counter).cell("x", "y")


@pytest.mark.parametrize(("cells", "slices"), [(0, 1), (1, 1), (10, 1), (11, 2), (25, 3)])
def test_slices_cover_every_cell_once_and_an_empty_family_has_its_head(cells: int, slices: int) -> None:
    family = Family("f", "counter", "help", ("a",), Counter)
    for number in range(cells):
        family.cell(str(number)).add(number)
    metrics = list(family.slices(10))
    assert len(metrics) == slices
    assert [sample.value for metric in metrics for sample in metric.samples] == list(range(cells))
