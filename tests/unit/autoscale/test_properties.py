"""Properties of every division of a total."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import assume, settings
from hypothesis import given as given_these
from hypothesis import strategies as st

from proxy.autoscale.distribution import (
    EXACT,
    OPEN,
    ShareBand,
    bounded,
    cost_baseline,
    distribute,
    project,
    read_bands,
    round_bounded,
    within,
)
from proxy.autoscale.policy import SATURATION, Cause, Coordination, Result, Role, Signal
from tests.helpers.examples import examples

EXAMPLES = 50
NAMES = ("prefill", "decode", "encode", "vision")
MISSED = {Cause.INFEASIBLE, Cause.CLAMPED, Cause.ROUNDING}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "min", "max"]), inner),
    max_leaves=6,
)
values = st.floats() | st.integers(-5, 100) | st.sampled_from([None, True, "NaN", 1e308, -1.0])
pressed = st.floats(0, 100, allow_subnormal=False)


@st.composite
def roles_of(draw: st.DrawFn, count: int | None = None) -> list[Role]:
    names = NAMES[: count or draw(st.integers(1, 4))]
    roles = []
    for name in names:
        low = draw(st.integers(0, 5))
        roles.append(
            Role(
                name=name,
                min=low,
                max=draw(st.integers(max(low, 1), 25)),
                cost=draw(st.sampled_from([0.0, 1.0, 1.0, 2.5, 60.0])),
                weight=draw(st.sampled_from([0.0, 1.0, 3.0, 8.0])),
                current=draw(st.none() | st.integers(0, 30)),
                ready=draw(st.none() | st.integers(0, 30)),
                demand=draw(st.none() | st.integers(0, 30)),
            )
        )
    return roles


@st.composite
def bands_of(draw: st.DrawFn) -> dict[str, Any]:
    bands: dict[str, Any] = {}
    for name in NAMES:
        if draw(st.booleans()):
            low, high = sorted((draw(st.integers(0, 100)), draw(st.integers(0, 100))))
            bands[name] = {"min": low, "max": high}
    return bands


def coordinations(**fixed: Any) -> st.SearchStrategy[Coordination]:
    return _coordinations(fixed)


@st.composite
def _coordinations(draw: st.DrawFn, fixed: dict[str, Any]) -> Coordination:
    drawn: dict[str, Any] = {
        "mode": "preferred",
        "preferred_ratio": draw(bands_of()),
        "alpha": draw(st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0])),
        "baseline": draw(st.sampled_from(["cost", "current", "weights", "demand"])),
        "normalization": draw(st.sampled_from(["absolute", "relative"])),
        "weight_by": draw(st.sampled_from(["none", "ready"])),
        "combine": draw(st.sampled_from(["mean", "max"])),
        "pressure_floor": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "hysteresis_percent": draw(st.sampled_from([0.0, 4.0, 20.0])),
        "panic_hold": draw(st.booleans()),
        "coupled": draw(st.booleans()),
    }
    return Coordination(**{**drawn, **fixed})


metrics_of = st.dictionaries(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(list(SATURATION)), values))
good_metrics = st.fixed_dictionaries(
    {name: st.fixed_dictionaries(dict.fromkeys(SATURATION, pressed)) for name in NAMES}
)
totals = st.integers(-3, 80)


def given(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda test: settings(max_examples=examples(EXAMPLES))(given_these(*strategies)(test))


def plain(result: Result) -> dict[str, int]:
    return dict(result.replicas)


@given(roles_of(), coordinations() | coordinations(mode="off"), totals, metrics_of, st.booleans())
def test_1_and_2_the_total_is_kept_within_the_bounds_of_every_role(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any, panic: bool
) -> None:
    result = distribute(roles, coordination, total, metrics, panic)
    live = bounded(roles, coordination, total)
    assert sum(result.replicas.values()) == result.total == within(live, total)
    assert all(type(result.replicas[role.name]) is int for role in roles)
    assert all(role.min <= result.replicas[role.name] <= role.max for role in live)


@given(roles_of(), coordinations(mode="off"), totals, metrics_of, st.booleans())
def test_3_off_is_the_cost_baseline_whatever_the_other_settings_are(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any, panic: bool
) -> None:
    live = bounded(roles, coordination, total)
    result = distribute(roles, coordination, total, metrics, panic)
    assert plain(result) == cost_baseline(live, within(live, total))
    assert (result.applied, result.reasons, result.band_satisfied) == ("off", (), None)


@given(roles_of(), coordinations(), totals, metrics_of, st.booleans())
def test_4_the_same_question_has_the_same_result(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any, panic: bool
) -> None:
    ask = (roles, coordination, total, metrics, panic)
    assert distribute(*ask) == distribute(*ask)


@given(roles_of(), coordinations(), totals, metrics_of)
def test_5_shares_are_shares(roles: list[Role], coordination: Coordination, total: int, metrics: Any) -> None:
    result = distribute(roles, coordination, total, metrics)
    for shares in (result.baseline_share, result.pressure_share, result.blended_share):
        assert not result.total or math.isclose(sum(shares.values()), 1, abs_tol=1e-9)
        assert all(-1e-12 <= share <= 1 + 1e-12 for share in shares.values())


@given(roles_of(), coordinations(), totals, metrics_of)
def test_6_every_role_is_within_one_replica_of_its_target(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any
) -> None:
    result = distribute(roles, coordination, total, metrics)
    if Cause.HYSTERESIS not in result.reasons:
        assert all(abs(result.replicas[name] - aim) < 1 for name, aim in result.target.items())


@given(roles_of(), coordinations(), totals, metrics_of)
def test_7_and_9_a_missed_band_is_reported_with_one_reason(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any
) -> None:
    result = distribute(roles, coordination, total, metrics)
    bands = {name: one for name, one in coordination.preferred_ratio.items() if name in result.replicas}
    if not result.total:
        return
    kept = all(
        one["min"] * result.total <= 100 * result.replicas[name] <= one["max"] * result.total
        for name, one in bands.items()
    )
    assert result.band_satisfied == kept
    assert len(MISSED & set(result.reasons)) == (0 if kept else 1)


@given(roles_of(), coordinations(), totals, metrics_of)
def test_8_bands_hold_if_whole_numbers_permit(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any
) -> None:
    result = distribute(roles, coordination, total, metrics)
    live, n = bounded(roles, coordination, total), result.total
    bands, _ = read_bands(coordination.preferred_ratio, live)
    found = {role.name: whole_numbers(role, bands.get(role.name, OPEN), n) for role in live}
    assume(all(found.values()))
    if sum(min(one) for one in found.values()) <= n <= sum(max(one) for one in found.values()):
        assert result.band_satisfied


def whole_numbers(role: Role, one: ShareBand, total: int) -> list[int]:
    return [count for count in range(role.min, role.max + 1) if one.holds(count, total)]


@given(roles_of(), coordinations(), totals, metrics_of)
def test_10_panic_removes_nothing(roles: list[Role], coordination: Coordination, total: int, metrics: Any) -> None:
    result = distribute(roles, coordination, total, metrics, panic=True)
    live = bounded(roles, coordination, total)
    held = {role.name: min(max(role.current or 0, role.min), role.max) for role in live}
    if coordination.panic_hold and sum(held.values()) <= result.total:
        assert all(result.replicas[name] >= count for name, count in held.items())
    else:
        assert plain(result) == cost_baseline(live, result.total)
    assert (result.applied, result.reasons) == ("panic", (Cause.PANIC,))


@given(roles_of(), coordinations(coupled=True) | coordinations(coupled=True, mode="off"), totals, metrics_of)
def test_11_coupled_roles_are_all_present_or_all_absent(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any
) -> None:
    counts = distribute(roles, coordination, total, metrics).replicas.values()
    assert all(counts) or not any(counts)


@given(roles_of(), coordinations(), totals, metrics_of, st.data())
def test_12_the_order_of_the_roles_does_not_matter(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any, data: st.DataObject
) -> None:
    """Cost breaks ties by it, so no baseline here comes from the cost."""
    counts = [(role.current or 0) + 1 for role in roles]
    roles = [
        dataclasses.replace(role, weight=role.weight + 1, current=count, demand=2 * count)
        for role, count in zip(roles, counts, strict=True)
    ]
    coordination = dataclasses.replace(
        coordination, baseline="weights" if coordination.baseline == "cost" else coordination.baseline
    )
    shuffled = data.draw(st.permutations(roles))
    assert plain(distribute(roles, coordination, total, metrics)) == plain(
        distribute(shuffled, coordination, total, metrics)
    )


@given(roles_of(2), coordinations(baseline="weights", preferred_ratio={}), totals, good_metrics)
def test_13_with_two_roles_an_added_replica_removes_none(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any
) -> None:
    roles = [dataclasses.replace(role, current=None) for role in roles]
    less, more = (distribute(roles, coordination, count, metrics).replicas for count in (total, total + 1))
    assert all(more[name] >= less[name] for name in less)


@given(roles_of(), coordinations(alpha=0.0, preferred_ratio={}, baseline="cost"), totals, metrics_of)
def test_14_without_pressure_and_bands_the_result_is_the_baseline(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any
) -> None:
    roles = [dataclasses.replace(role, current=None) for role in roles]
    live = bounded(roles, coordination, total)
    found = distribute(roles, coordination, total, metrics)
    assert plain(found) == cost_baseline(live, within(live, total))


@given(roles_of(), coordinations(), totals)
def test_15_without_a_metric_pressure_has_no_effect(roles: list[Role], coordination: Coordination, total: int) -> None:
    blind = distribute(roles, coordination, total, {})
    assert plain(blind) == plain(distribute(roles, dataclasses.replace(coordination, alpha=0.0), total, {}))
    assert Cause.UNAVAILABLE in blind.reasons or not blind.total


@given(roles_of(), coordinations(), totals, good_metrics, st.sampled_from([0.125, 0.5, 2.0, 64.0]))
def test_16_scale_does_not_matter(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any, factor: float
) -> None:
    weights = {role.name: {name: 0.25 * at for at, name in enumerate(SATURATION, 1)} for role in roles}
    here = dataclasses.replace(coordination, signal_weights=weights)
    heavier = {role: {name: value * factor for name, value in one.items()} for role, one in weights.items()}
    there = dataclasses.replace(
        coordination,
        signal_weights=heavier,
        saturation={name: value * factor for name, value in SATURATION.items()},
    )
    scaled = {role: {name: value * factor for name, value in one.items()} for role, one in metrics.items()}
    weighted = [dataclasses.replace(role, weight=role.weight * factor) for role in roles]
    assert plain(distribute(roles, here, total, metrics)) == plain(distribute(weighted, there, total, scaled))


@given(roles_of(2), coordinations(hysteresis_percent=0.0, normalization="absolute"), totals, good_metrics, pressed)
def test_17_more_pressure_never_reduces_a_role(
    roles: list[Role], coordination: Coordination, total: int, metrics: dict[str, dict[str, float]], by: float
) -> None:
    roles = [dataclasses.replace(role, current=(role.current or 0)) for role in roles]
    worse = {**metrics, "prefill": {name: value + by for name, value in metrics["prefill"].items()}}
    before, after = (distribute(roles, coordination, total, received) for received in (metrics, worse))
    assume(not any(Cause.IDLE in one.reasons or Cause.HYSTERESIS in one.reasons for one in (before, after)))
    assert after.replicas["prefill"] >= before.replicas["prefill"]


@given(roles_of(), coordinations(), totals, metrics_of, st.booleans())
def test_18_a_fixed_role_stays_fixed(
    roles: list[Role], coordination: Coordination, total: int, metrics: Any, panic: bool
) -> None:
    roles[0] = dataclasses.replace(roles[0], min=roles[0].max)
    assert distribute(roles, coordination, total, metrics, panic).replicas[roles[0].name] == roles[0].max


@st.composite
def projections(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], float]:
    count = draw(st.integers(1, 5))
    quotas = [draw(st.sampled_from([0.0, 1e-308]) | st.floats(0, 50)) for _ in range(count)]
    low = [draw(st.integers(0, 9) | st.floats(0, 9)) for _ in range(count)]
    high = [bound + draw(st.integers(0, 9) | st.floats(0, 9)) for bound in low]
    part = draw(st.floats(0, 1))
    return quotas, low, high, math.fsum(low) * (1 - part) + math.fsum(high) * part


@given(projections())
def test_19_a_projection_has_the_sum_the_bounds_and_the_proportions(
    received: tuple[list[float], list[float], list[float], float],
) -> None:
    quotas, low, high, total = received
    found = project(quotas, low, high, total)
    assert math.isclose(math.fsum(found), total, abs_tol=1e-6)
    assert all(a - 1e-9 <= x <= b + 1e-9 for a, x, b in zip(low, found, high, strict=True))
    free = [
        at for at, x in enumerate(found) if low[at] + 1e-6 < x < high[at] - 1e-6 and quotas[at] > 1e-6 * sum(quotas)
    ]
    for one, other in itertools.permutations(free, 2):
        assert quotas[one] > quotas[other] or found[one] <= found[other] + 1e-6
    again = project(found, low, high, total)
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(found, again, strict=True))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 40), st.data())
def test_20_rounding_keeps_a_whole_sum(weights: list[int], total: int, data: st.DataObject) -> None:
    assume(sum(weights) > 0)
    exact = [total * weight / sum(weights) for weight in weights]
    names = data.draw(st.permutations([f"role-{at}" for at in range(len(weights))]))
    found = round_bounded(exact, total, names)
    assert sum(found) == total
    assert all(abs(count - value) < 1 for count, value in zip(found, exact, strict=True))
    assert all(count == value for count, value in zip(found, exact, strict=True) if value == int(value))


@given(roles_of(), coordinations(), totals, anything, anything, st.booleans())
def test_21_no_json_input_makes_it_fail(
    roles: list[Role], coordination: Coordination, total: int, bands: Any, metrics: Any, panic: bool
) -> None:
    coordination = dataclasses.replace(coordination, preferred_ratio=bands)
    result = distribute(roles, coordination, total, metrics, panic)
    assert sum(result.replicas.values()) == result.total
    assert min(result.replicas.values()) >= 0


@given(roles_of(2), good_metrics, totals, st.floats(0.01, 100), pressed)
def test_an_additional_signal_moves_the_share_of_its_role_and_not_the_total(
    roles: list[Role], metrics: dict[str, dict[str, float]], total: int, saturation: float, value: float
) -> None:
    signals = {"prefill": {"kv_transfers": Signal("vllm:transfers", saturation, 1.0)}}
    received = {**metrics, "prefill": {**metrics["prefill"], "kv_transfers": value}}
    bare, more = Coordination(mode="preferred"), Coordination(mode="preferred", signals=signals)
    before, after = distribute(roles, bare, total, received), distribute(roles, more, total, received)
    assert before.total == after.total
    if after.total:
        known, at_most = pressure(before), pressure(after)
        assert math.isclose(at_most, (known + min(value / saturation, 1)) / 2, abs_tol=1e-9)


def pressure(result: Result) -> float:
    found: Mapping[str, float | None] = result.pressure
    assert found["prefill"] is not None
    return found["prefill"]


def test_the_slack_of_floats_is_far_below_a_replica() -> None:
    assert EXACT < 1e-3
