"""Worked examples of the recommender: inputs and exact outputs.

`KVLANE_AUTOSCALE_VECTORS=path` runs another file of the same form.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.scaling.hard_ratio import HardRatio
from proxy.autoscale import evaluation, validation
from proxy.autoscale.behavior import (
    Behavior,
    Moments,
    Panic,
    ScaleDown,
    ScaleUp,
    WindowExtremes,
    corrected,
    held,
    recent,
)
from proxy.autoscale.demand import Kind, Metric, desired, joined, recommended
from proxy.autoscale.distribution import cost_baseline, project, role_pressure, round_bounded
from proxy.autoscale.drains import DrainingReplica, drain_order
from proxy.autoscale.measures import quantile_between
from proxy.autoscale.policy import Coordination, Role

VECTORS = Path(os.environ.get("KVLANE_AUTOSCALE_VECTORS", Path(__file__).parent / "vectors.json"))
CLOSE = 1e-6


def numbers(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are texts in the file."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and set(found) == set(expected)
            and all(same(found[key], item) for key, item in expected.items())
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))
    if is_number(expected) and is_number(found):
        return math.isclose(found, expected, rel_tol=0, abs_tol=CLOSE)
    return type(found) is type(expected) and bool(found == expected)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def distribute(given: dict[str, Any]) -> Any:
    return evaluation.result(evaluation.evaluate(given)[0])


def validate(given: dict[str, Any]) -> Any:
    names = [role["name"] for role in given["roles"]]
    faults = [
        *validation.read_roles(given["roles"])[1],
        *validation.read_coordination(given["coordination"], names)[1],
    ]
    return [str(fault) for fault in faults]


def rounded(given: dict[str, Any]) -> Any:
    return round_bounded(given["x"], given["total"], given["names"])


def projected(given: dict[str, Any]) -> Any:
    return project(given["q"], given["min"], given["max"], given["total"])


def pressure(given: dict[str, Any]) -> Any:
    return role_pressure(given["role"], given["metrics"], Coordination(combine=given["combine"]))


def desired_for_metric(given: dict[str, Any]) -> Any:
    value = given["per_pod"] if "per_pod" in given else given["fleet"]
    return desired(Metric(**given["metric"]), value, given["current"], given["tolerance"])


def drained(given: dict[str, Any]) -> Any:
    of_role = [one for one in given["pods"] if one["role"] == given["role"]]
    replicas = [DrainingReplica(**{key: value for key, value in one.items() if key != "role"}) for one in of_role]
    return [one.name for one in drain_order(replicas, given["policy"])]


def cost(given: dict[str, Any]) -> Any:
    roles = [Role(**one) for one in given["params"]]
    return cost_baseline(roles, given["total"], given["rate"])


def recommended_instances(given: dict[str, Any]) -> Any:
    """A metric of a fleet is a sum there, metrics of pods are averages."""
    current, tolerance = given["current"], given["tolerance"]
    queried = [
        desired(Metric(name, "total", target), given["external"][name], current, tolerance)
        if name in given["external"]
        else desired(Metric(name, "avg", target), [pod.get(name) for pod in given["ready"]], current, tolerance)
        for name, target in given["targets"].items()
    ]
    found = recommended(given["min_instances"], given["max_instances"], current, queried)
    return {"skip": True} if found is None else {"recommended": found, "skip": False}


def corrected_instances(given: dict[str, Any]) -> Any:
    """An unknown way to select is no limit there."""

    def limits(name: str) -> dict[str, Any]:
        count, percent, select = given[name]
        chosen = select.lower() if select in ("Or", "And") else "none"
        return {"instances": count, "percent": percent, "select": chosen}

    def seen(name: str) -> list[int]:
        found: list[int] = given["history"].get(name, [])
        return found

    current = given["current"]
    past = WindowExtremes(
        highest_recommended=max(seen("max_rec"), default=None),
        lowest_recommended=min(seen("min_rec"), default=None),
        highest_in_effect=max([current, *seen("max_corr")]),
        lowest_in_effect=min([current, *seen("min_corr_stable")]),
        lowest_in_panic=min([current, *seen("min_corr_panic")]),
    )
    behavior = Behavior(ScaleUp(**limits("up")), ScaleDown(**limits("down")), Panic(percent=given["panic_percent"]))
    found = corrected(behavior, past, current, given["recommended"], panic=given["panic"])
    return min(max(found, given["min_instances"]), given["max_instances"])


def enforce_role_ratio(given: dict[str, Any]) -> Any:
    ratio = HardRatio(given["num"], given["den"], given["min_ratio"], given["max_ratio"])
    found = ratio.repair(given["replicas"], {name: (low, high) for name, (low, high) in given["bounds"].items()})
    adjusted = found != given["replicas"]
    return {"replicas": found, "adjusted": adjusted, "ratio": found[given["num"]] / found[given["den"]]}


def aggregate_external(given: dict[str, Any]) -> Any:
    """Whether it is a sum stands in the name there."""
    levels = ("_utilization", "_usage", "_ratio", "_percent", "_saturation")
    kind: Kind = "value" if given["name"].endswith(levels) else "total"
    return joined(kind, [(value, replicas) for value, replicas in given["samples"]])


def window(given: dict[str, Any]) -> Any:
    """The steps themselves, with what was found in the place of what was expected."""
    best = max if given["best"] == "max" else min
    past: Moments = []
    found: list[Any] = []
    for step, *rest in given["steps"]:
        at, value = rest[:2]
        if step == "append":
            past.append((at, value))
            found.append([step, at, value])
        elif given["kind"] == "record":
            found.append([step, at, value, best(recent(past, at, given["fresh_ms"]), default=None)])
        else:
            found.append([step, at, value, best([value, *held(past, at, given["fresh_ms"])])])
    return found


def quantile_in_diff(given: dict[str, Any]) -> Any:
    return quantile_between(given["percentile"], *([tuple(one) for one in given[when]] for when in ("now", "past")))


GROUPS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "distribute": distribute,
    "validate": validate,
    "round_bounded": rounded,
    "project": projected,
    "role_pressure": pressure,
    "desired_for_metric": desired_for_metric,
    "drain_order": drained,
    "cost_baseline": cost,
}
KTHENA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "recommended_instances": recommended_instances,
    "corrected_instances": corrected_instances,
    "enforce_role_ratio": enforce_role_ratio,
    "aggregate_external": aggregate_external,
    "cost_baseline": cost,
    "window": window,
    "quantile_in_diff": quantile_in_diff,
}


def vectors() -> list[Any]:
    groups = json.loads(VECTORS.read_text())["groups"]
    return [
        pytest.param(
            KTHENA[vector["fn"]] if group == "kthena" else GROUPS[group],
            numbers(vector["in"]),
            numbers(vector["out"]),
            id=f"{group}-{vector.get('id', index)}",
        )
        for group, listed in groups.items()
        for index, vector in enumerate(listed)
    ]


@pytest.mark.parametrize(("run", "given", "expected"), vectors())
def test_a_vector_gives_its_expected_result(
    run: Callable[[dict[str, Any]], Any], given: dict[str, Any], expected: Any
) -> None:
    if expected == "see steps":
        expected = given["steps"]
        assert any(step[0] == "best" for step in expected)
    if isinstance(expected, str) and expected.startswith("error:"):
        with pytest.raises(ValueError):
            run(given)
        return
    found = run(given)
    assert same(found, expected), found
