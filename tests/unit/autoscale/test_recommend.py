"""Single divisions that the vectors do not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.autoscale.distribution import distribute
from proxy.autoscale.policy import Cause, Coordination, Role, Signal

ROLES = (Role("prefill", 1, 20, current=4), Role("decode", 1, 40, current=6))
PREFERRED = Coordination(mode="preferred", baseline="current")
HOT_PREFILL = {"prefill": {"queue_depth": 32, "ttft": 3.0}, "decode": {"queue_depth": 0, "kv_cache_utilization": 0.2}}


def test_idle_roles_keep_their_baseline_despite_noise() -> None:
    noise = {"prefill": {"queue_depth": 1, "ttft": 0.05}, "decode": {"queue_depth": 0, "kv_cache_utilization": 0.02}}
    result = distribute(ROLES, PREFERRED, 10, noise)
    assert (dict(result.replicas), result.reasons) == ({"prefill": 4, "decode": 6}, (Cause.IDLE,))


def test_changes_within_the_hysteresis_are_ignored() -> None:
    roles = (replace(ROLES[0], weight=46.0), replace(ROLES[1], weight=54.0))
    by_weight = Coordination(mode="preferred", baseline="weights", alpha=0.0)
    moved = distribute(roles, by_weight, 10, {})
    held = distribute(roles, replace(by_weight, hysteresis_percent=4.0), 10, {})
    assert dict(moved.replicas) == {"prefill": 5, "decode": 5}
    assert dict(held.replicas) == {"prefill": 4, "decode": 6}
    assert Cause.HYSTERESIS in held.reasons
    assert Cause.HYSTERESIS not in moved.reasons


def test_of_two_equally_near_splits_the_current_one_stays() -> None:
    halves = (replace(ROLES[0], weight=35.0), replace(ROLES[1], weight=65.0))
    by_weight = Coordination(mode="preferred", baseline="weights", alpha=0.0)
    result = distribute(halves, by_weight, 10, {})
    assert dict(result.replicas) == {"prefill": 4, "decode": 6}
    elsewhere = [replace(role, current=None) for role in halves]
    assert dict(distribute(elsewhere, by_weight, 10, {}).replicas) == {"prefill": 3, "decode": 7}


def test_the_hysteresis_does_not_keep_a_violated_ratio() -> None:
    bands = {"prefill": {"min": 50, "max": 60}}
    result = distribute(ROLES, replace(PREFERRED, alpha=0.0, hysteresis_percent=20, preferred_ratio=bands), 10, {})
    assert dict(result.replicas) == {"prefill": 5, "decode": 5}


def test_contradicting_minima_yield_in_proportion() -> None:
    bands = {"prefill": {"min": 60, "max": 100}, "decode": {"min": 90, "max": 100}}
    result = distribute(ROLES, replace(PREFERRED, preferred_ratio=bands), 10, HOT_PREFILL)
    assert dict(result.replicas) == {"prefill": 4, "decode": 6}
    assert result.reasons == (Cause.INFEASIBLE,)


def test_contradicting_maxima_are_exceeded_in_proportion() -> None:
    bands = {"prefill": {"min": 0, "max": 10}, "decode": {"min": 0, "max": 40}}
    result = distribute(ROLES, replace(PREFERRED, preferred_ratio=bands), 10, HOT_PREFILL)
    assert dict(result.replicas) == {"prefill": 2, "decode": 8}
    assert result.reasons == (Cause.INFEASIBLE,)


def test_bands_are_used_as_they_are_if_no_whole_number_fits() -> None:
    """2 + 3 + 4 are all that the bands have of them, and 10 are to be divided."""
    roles = [Role(name, 0, 10, weight=weight) for name, weight in (("a", 8.0), ("b", 1.0), ("c", 1.0))]
    bands = {"a": {"min": 20, "max": 29}, "b": {"min": 30, "max": 39}, "c": {"min": 40, "max": 49}}
    received = Coordination(mode="preferred", baseline="weights", alpha=0.0, preferred_ratio=bands)
    result = distribute(roles, received, 10, {})
    assert result.target == pytest.approx({"a": 2.9, "b": 3.1, "c": 4.0})
    assert result.reasons == (Cause.UNAVAILABLE, Cause.ROUNDING)


def test_the_baseline_is_by_cost_while_the_current_replicas_are_unknown() -> None:
    roles = (replace(ROLES[0], current=None), ROLES[1])
    result = distribute(roles, PREFERRED, 10, {})
    assert result.baseline_share == {"prefill": 0.6, "decode": 0.4}


def test_the_baseline_can_be_the_demand_of_each_role() -> None:
    by_demand = replace(PREFERRED, baseline="demand")
    roles = (replace(ROLES[0], demand=2), replace(ROLES[1], demand=8))
    assert distribute(roles, by_demand, 20, {}).replicas == {"prefill": 4, "decode": 16}
    assert distribute(ROLES, by_demand, 10, {}).baseline_share == {"prefill": 0.6, "decode": 0.4}


def test_with_weights_more_ready_replicas_press_harder() -> None:
    even = {name: {"queue_depth": 16} for name in ("prefill", "decode")}
    roles = (replace(ROLES[0], ready=1), replace(ROLES[1], ready=3))
    weighted = distribute(roles, replace(PREFERRED, weight_by="ready"), 10, even)
    assert weighted.pressure_share == {"prefill": 0.25, "decode": 0.75}
    assert distribute(roles, PREFERRED, 10, even).pressure_share == {"prefill": 0.5, "decode": 0.5}


def test_a_signal_of_one_role_alone_has_no_effect() -> None:
    relative = replace(PREFERRED, normalization="relative")
    alone = {"prefill": {"ttft": 9.0}, "decode": {"kv_cache_utilization": 0.02}}
    result = distribute(ROLES, relative, 10, alone)
    assert result.pressure == {"prefill": None, "decode": None}
    assert result.reasons == (Cause.UNAVAILABLE,)


def test_with_relative_normalisation_idle_roles_are_idle_too() -> None:
    relative = replace(PREFERRED, normalization="relative")
    result = distribute(ROLES, relative, 10, {name: {"queue_depth": 0} for name in ("prefill", "decode")})
    assert result.reasons == (Cause.IDLE,)


def test_readings_beyond_floats_are_compared() -> None:
    relative = replace(PREFERRED, normalization="relative")
    huge = {"prefill": {"queue_depth": 1.5e308}, "decode": {"queue_depth": 0.5e308}}
    assert distribute(ROLES, relative, 10, huge).pressure == {"prefill": 0.75, "decode": 0.25}


def test_a_signal_without_weight_is_ignored() -> None:
    result = distribute(ROLES, PREFERRED, 10, {"decode": {"ttft": 9.0}, "prefill": {"kv_cache_utilization": 1.0}})
    assert result.pressure == {"prefill": None, "decode": None}


def test_a_further_signal_cannot_replace_an_existing_one() -> None:
    signals = {"prefill": {"queue_depth": Signal("x", 1.0, 100.0)}}
    bare = distribute(ROLES, PREFERRED, 10, HOT_PREFILL)
    assert distribute(ROLES, replace(PREFERRED, signals=signals), 10, HOT_PREFILL) == bare


def test_with_three_roles_one_replica_more_can_cost_a_role_one() -> None:
    """Largest remainders do that; the dead band and the gate damp it."""
    roles = [Role(name, 0, 50, weight=weight) for name, weight in (("a", 6.0), ("b", 6.0), ("c", 2.0))]
    by_weight = Coordination(mode="preferred", baseline="weights", alpha=0.0)
    assert distribute(roles, by_weight, 10, {}).replicas["c"] == 2
    assert distribute(roles, by_weight, 11, {}).replicas["c"] == 1


@pytest.mark.parametrize("roles", [(), (Role("decode", 0, 4),)])
def test_an_empty_total_is_not_split(roles: Any) -> None:
    result = distribute(roles, PREFERRED, 0, None)
    assert not any(result.replicas.values())
    assert result.band_satisfied
