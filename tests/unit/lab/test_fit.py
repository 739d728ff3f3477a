from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.lab.fit import TooLittle, fit, fitted, predicted
from proxy.lab.record import TraceRecord
from tests.helpers.lab.traffic import TIMING, conversations, fleet, record

BUDGET = 2_048


def test_the_cost_of_a_step_is_fitted_to_observations() -> None:
    found = fit(record(conversations(400, 4.0), fleet()), BUDGET)
    assert found.timing.base == pytest.approx(TIMING.base, rel=0.1)
    assert found.timing.per_prefill_token == pytest.approx(TIMING.per_prefill_token, rel=0.1)
    assert found.timing.per_sequence == pytest.approx(TIMING.per_sequence, rel=0.5)
    assert found.first_token < 0.1
    assert found.pace < 0.05
    assert set(found.slowdowns.values()) == {1.0}


def test_a_slower_pod_is_detected() -> None:
    found = fit(record(conversations(400, 4.0), fleet(slow=3.0)), BUDGET)
    assert found.slowdowns["pod-0"] == pytest.approx(3.0, rel=0.15)
    assert found.slowdowns["pod-1"] == pytest.approx(1.0, rel=0.15)
    assert found.timing.per_prefill_token == pytest.approx(TIMING.per_prefill_token, rel=0.15)


def test_a_few_delayed_requests_do_not_affect_the_fit() -> None:
    whole = record(conversations(400, 4.0), fleet())
    odd = tuple(
        replace(seen, ttft=30.0 + (seen.ttft or 0.0), duration=30.0 + seen.duration) if at % 20 == 7 else seen
        for at, seen in enumerate(whole.seen)
    )
    found = fit(replace(whole, seen=odd), BUDGET)
    assert found.timing.per_prefill_token == pytest.approx(TIMING.per_prefill_token, rel=0.2)


def test_responses_that_came_in_one_piece_after_a_pause_do_not_count() -> None:
    whole = record(conversations(400, 4.0), fleet())
    odd = tuple(
        replace(seen, duration=(seen.ttft or 0.0) + 0.0004) if at % 8 == 3 else seen
        for at, seen in enumerate(whole.seen)
    )
    found = fit(replace(whole, seen=odd), BUDGET)
    assert found.timing.base == pytest.approx(TIMING.base, rel=0.1)
    assert found.pace < 0.05


def test_complete_responses_do_not_show_their_first_token() -> None:
    whole = record(conversations(100, 4.0), fleet())
    silent = replace(whole, seen=tuple(replace(seen, ttft=None) for seen in whole.seen))
    with pytest.raises(TooLittle, match="--hardware"):
        fit(silent, BUDGET)


def test_a_record_of_a_few_requests_is_too_short() -> None:
    with pytest.raises(TooLittle, match="a fit needs 20"):
        fit(record(conversations(10, 4.0), fleet()), BUDGET)


def test_a_trace_without_times_is_not_enough() -> None:
    with pytest.raises(TooLittle):
        fit(TraceRecord(conversations(100, 4.0)), BUDGET)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), st.integers(0, 1_000))
def test_least_squares_recover_the_parameters(truth: list[float], seed: int) -> None:
    rng = Random(seed)
    columns = [[rng.uniform(1.0, 100.0) for _ in truth] for _ in range(30)]
    rows = [(values, predicted(truth, values)) for values in columns]
    assert fitted(rows, 3) == pytest.approx(truth, rel=1e-4)


def test_no_cost_is_negative() -> None:
    rng = Random(1)
    columns = [[rng.uniform(1.0, 100.0), rng.uniform(0.0, 1.0)] for _ in range(50)]
    rows = [(values, 2.0 * values[0] - 0.5 * values[1]) for values in columns]
    steep, flat = fitted(rows, 2)
    assert flat == 0.0
    assert steep == pytest.approx(2.0, rel=0.05)


def test_an_unobserved_term_costs_nothing() -> None:
    assert fitted([([1.0, 0.0], 3.0), ([2.0, 0.0], 6.0)], 2) == pytest.approx([3.0, 0.0])
    assert fitted([], 2) == [0.0, 0.0]


def test_effects_that_always_occur_together_add_up() -> None:
    rows = [([at, at], 4.0 * at) for at in (1.0, 2.0, 3.0)]
    assert predicted(fitted(rows, 2), [1.0, 1.0]) == pytest.approx(4.0)
