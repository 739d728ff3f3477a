"""Policies as they are written: what is good loads, what is wrong is named with all its faults at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.autoscale.policy import Coordination
from proxy.autoscale.settings import AutoscaleSettings, load, warnings
from proxy.autoscale.validation import read_coordination, read_roles
from proxy.core.errors import ConfigError

POLICIES = sorted((Path(__file__).parents[3] / "config" / "autoscale").glob("*.yaml"))

ONE = """
interval: 30s
pools:
  default:
    mode: ACTIVE
    roles:
      - {name: prefill, min: 1, max: 20, gpus: 4, metrics: [{name: backlog, kind: Total, target: 1.5}]}
      - {name: decode, min: 1, max: 40, metrics: [{name: kv, kind: value, target: 0.8, source: "kv_cache_usage"}]}
    behavior: {scaleDown: {instances: 2, select: And, stabilization: 10m}, panic: {hold: 2m}}
    coordination:
      mode: Preferred
      weightBy: Ready
      panicHold: false
      preferredRatio: {prefill: {min: 15, max: 35}}
      signals: {decode: {transfers: {source: "vllm:nixl_queue", saturation: 8}}}
    gpuBudget: 64
"""

WRONG = """
interval: 0s
pools:
  default:
    mode: Off
    tolerancePercent: 200
    behavior: {scaleUp: {select: xor, period: 31m}}
    roles:
      - {name: " prefill", min: 3, max: 2, metrics: [{name: a, kind: sum, target: 0}]}
      - {name: decode, min: -1, max: 2, metrics: []}
      - {name: decode, min: 0, max: 0, cost: .inf}
      - decode
      - {name: encode, min: 1, max: 2, metrics: [{name: a, kind: avg, target: 1}, {name: a, kind: avg, target: 1}]}
    coordination:
      mode: Strict
      alpha: 2
      baseline: price
      hysteresisPercent: 21
      panicHold: maybe
      preferredRatio: {decode: {min: 60, max: 40}, decoder: {min: 1, max: 2}, encode: {min: 1, mx: 2}}
      saturation: {queue_depth: 0, kv_cache: 1}
      signalWeights: {decode: {ttft: -1}, encode: {ttft: 0}, "*": 3}
      signals: {decode: {ttft: {source: x, saturation: 1}, own: {saturation: 0}}, coder: {}}
      baselin: current
    gpuBudget: 0
    actuator: {type: exec}
"""

NAMED = """\
interval
pools.default.mode
pools.default.tolerancePercent
pools.default.behavior.scaleUp.select
pools.default.behavior.scaleUp.period
pools.default.roles[0].name
pools.default.roles[0].min
pools.default.roles[0].metrics[0].kind
pools.default.roles[0].metrics[0].target
pools.default.roles[1].min
pools.default.roles[1].metrics
pools.default.roles[2].name
pools.default.roles[2].max
pools.default.roles[2].cost
pools.default.roles[3]
pools.default.roles[4].metrics[1].name
pools.default.coordination
pools.default.coordination.mode
pools.default.coordination.alpha
pools.default.coordination.baseline
pools.default.coordination.hysteresisPercent
pools.default.coordination.panicHold
pools.default.coordination.preferredRatio
pools.default.coordination.preferredRatio.decode
pools.default.coordination.preferredRatio.encode
pools.default.coordination.preferredRatio.encode.max
pools.default.coordination.saturation
pools.default.coordination.saturation.queue_depth
pools.default.coordination.signalWeights.decode.ttft
pools.default.coordination.signalWeights.encode
pools.default.coordination.signalWeights.*
pools.default.coordination.signals
pools.default.coordination.signals.decode.ttft
pools.default.coordination.signals.decode.own.source
pools.default.coordination.signals.decode.own.saturation
pools.default.gpuBudget
pools.default.actuator
"""


def faults(text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as wrong:
        load(yaml.safe_load(text))
    return {problem.path: problem.message for problem in wrong.value.problems}


def loaded(text: str) -> AutoscaleSettings:
    return load(yaml.safe_load(text))


def test_keys_are_in_camel_case_and_choices_in_any_case() -> None:
    settings = loaded(ONE)
    pool = settings.pools["default"]
    prefill, decode = pool.roles
    assert (settings.interval, pool.mode, prefill.gpus, pool.gpu_budget) == (30.0, "active", 4, 64)
    assert (prefill.metrics[0].kind, decode.metrics[0].source) == ("total", "kv_cache_usage")
    assert (pool.behavior.scale_down.select, pool.behavior.scale_down.stabilization) == ("and", 600.0)
    assert pool.behavior.panic.hold == 120.0
    coordination = pool.coordination
    assert (coordination.mode, coordination.weight_by, coordination.panic_hold) == ("preferred", "ready", False)
    assert [name for name, _, _ in coordination.looked_at("decode")] == [
        "queue_depth",
        "kv_cache_utilization",
        "transfers",
    ]


def test_defaults_of_a_policy_suit_prefill_and_decode() -> None:
    """The recommender itself starts from a cost baseline without a dead band."""
    found = loaded(ONE).pools["default"].coordination
    assert (found.baseline, found.alpha, found.hysteresis_percent, found.coupled) == ("demand", 0.25, 8.0, True)
    bare = Coordination()
    assert (bare.baseline, bare.alpha, bare.hysteresis_percent, bare.coupled) == ("cost", 0.5, 0.0, False)


@pytest.mark.parametrize("spelling", ["off", "Off", "OFF", "'off'"])
def test_off_is_read_although_yaml_makes_it_false(spelling: str) -> None:
    role = "{name: a, min: 1, max: 2, metrics: [{name: m, kind: avg, target: 1}]}"
    found = loaded(f"pools: {{p: {{roles: [{role}], coordination: {{mode: {spelling}}}}}}}")
    assert found.pools["p"].coordination.mode in ("off", False)


def test_all_faults_of_a_policy_are_reported_with_paths() -> None:
    found = faults(WRONG)
    assert {f"autoscale.{path}" for path in NAMED.split()} == set(found)
    assert found["autoscale.pools.default.actuator"] == "type exec needs command"
    assert found["autoscale.pools.default.roles[0].min"] == "must be <= max"
    assert "did you mean 'baseline'?" in found["autoscale.pools.default.coordination"]


def test_no_fault_is_reported_twice() -> None:
    with pytest.raises(ConfigError) as wrong:
        load(yaml.safe_load(WRONG))
    named = [(problem.path, problem.message) for problem in wrong.value.problems]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("text", ["3", "[]", "{pools: 3}", "{pools: {p: 3}}", "{pools: {p: {roles: 3}}}"])
def test_an_invalid_policy_is_a_fault(text: str) -> None:
    assert faults(text)


def test_a_joint_total_needs_metrics_of_the_pool() -> None:
    assert faults("pools: {p: {total: joint, roles: [{name: a, min: 1, max: 2}]}}") == {
        "autoscale.pools.p.metrics": "is required with total: joint"
    }


def test_a_role_of_a_fixed_size_needs_no_metrics() -> None:
    assert loaded("pools: {p: {roles: [{name: a, min: 2, max: 2}]}}").pools["p"].roles[0].min == 2


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=4), st.lists, max_leaves=5)
    | st.dictionaries(
        st.sampled_from(["mode", "alpha", "preferred_ratio", "saturation", "signal_weights", "signals", "coupled"]),
        st.none() | st.floats() | st.dictionaries(st.text(max_size=3), st.none() | st.floats()),
    )
)
def test_validation_never_raises(written: Any) -> None:
    found = [*read_roles(written)[1], *read_coordination(written, ["decode"])[1]]
    assert found
    assert all(problem.message for problem in found)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.name)
def test_an_example_is_valid_and_documented(policy: Path) -> None:
    text = policy.read_text()
    assert text.startswith("# ")
    assert load(yaml.safe_load(text)["autoscale"]).pools


class TestWarnings:
    @pytest.mark.parametrize(
        ("changed", "path"),
        [
            ({"gpuBudget": 8}, "gpuBudget"),
            ({"gpuBudget": 1}, "gpuBudget"),
            ({"coordination": {"preferredRatio": {"decode": {"min": 1, "max": 99}}}}, "coordination.preferredRatio"),
            (
                {"coordination": {"signals": {"decode": {"x": {"source": "y", "saturation": 1}}}}},
                "coordination.signals",
            ),
            (
                {"coordination": {"mode": "preferred", "preferredRatio": {"decode": {"min": 96, "max": 100}}}},
                "coordination.preferredRatio",
            ),
            (
                {"coordination": {"mode": "preferred", "signalWeights": {"decode": {"ttft": 0.0, "queue_depth": 1}}}},
                None,
            ),
            ({"behavior": {"scaleDown": {"percent": 100}}}, "behavior.scaleDown"),
            ({"behavior": {"scaleUp": {"stabilization": "60s"}}}, "behavior.scaleUp.stabilization"),
            ({"staleAfter": "5s"}, "staleAfter"),
            ({"roles": [{"name": "vllm.a", "min": 2, "max": 2}]}, "roles[0].name"),
            ({"roles": [{"name": "a", "min": 2, "max": 2}], "coordination": {"mode": "preferred"}}, "coordination"),
            ({}, None),
        ],
    )
    def test_doubtful_settings_are_reported(self, changed: dict[str, Any], path: str | None) -> None:
        metric = [{"name": "m", "kind": "avg", "target": 1}]
        roles = [{"name": name, "min": 1, "max": 20, "metrics": metric} for name in ("prefill", "decode")]
        settings = load({"pools": {"p": {"roles": roles, **changed}}})
        found = [problem.path for problem in warnings(settings)]
        assert found == ([f"autoscale.pools.p.{path}"] if path else [])

    def test_a_section_without_pools_is_warned_of(self) -> None:
        assert [problem.path for problem in warnings(load({}))] == ["autoscale.pools"]


ACTING = """
pools:
  default:
    roles:
    - {name: prefill, min: 1, max: 4, metrics: [{name: m, kind: avg, target: 1}]}
    - {name: decode, min: 1, max: 4, externallyOwned: true, metrics: [{name: m, kind: avg, target: 1}]}
    actuator: %s
"""


def test_a_role_has_one_owner() -> None:
    found = faults(ACTING % "{type: exec, command: [scale]}")
    assert "externallyOwned" in found["autoscale.pools.default.actuator"]
    assert faults(ACTING % "{type: compose, targets: {decode: d, prefill: p}}").keys() == found.keys()
    good = loaded(ACTING % "{type: exec, command: [scale], roles: [prefill]}").pools["default"]
    assert good.actuator is not None
    assert good.actuator.owned(("prefill", "decode")) == ("prefill",)


def test_an_actuator_needs_existing_roles() -> None:
    found = faults(ACTING % "{type: exec, command: [scale], roles: [prefil]}")
    assert "did you mean 'prefill'?" in found["autoscale.pools.default.actuator.roles"]
    found = faults(ACTING % "{type: kubernetes, targets: {other: deployment/a}, roles: [prefill]}")
    assert "role 'prefill' has none" in found["autoscale.pools.default.actuator.targets"]


@pytest.mark.parametrize(
    ("actuator", "fault"),
    [
        ("{type: webhook, roles: [prefill]}", "type webhook needs url"),
        ("{type: exec, roles: [prefill], command: [a], url: 'http://a'}", "url means nothing to type exec"),
        ("{type: compose, targets: {prefill: p}, secret: s}", "secret means nothing to type compose"),
        (
            "{type: kubernetes, targets: {prefill: vllm}}",
            "'vllm' is no target; write deployment/NAME or GROUP/VERSION/RESOURCE/NAME",
        ),
    ],
)
def test_an_actuator_has_exactly_the_keys_of_its_type(actuator: str, fault: str) -> None:
    assert faults(ACTING % actuator)["autoscale.pools.default.actuator"] == fault


@pytest.mark.parametrize(
    ("old", "new", "path", "result"),
    [
        ("roles:\n", "mode: active\n    roles:\n", "mode", "without an actuator"),
        ("{name: m, kind", "{name: ttft, kind", "roles[0].metrics", "does not shrink"),
    ],
)
def test_a_policy_that_hardly_ever_acts_is_warned_of(old: str, new: str, path: str, result: str) -> None:
    text = (ACTING % "null").replace(old, new, 1)
    found = {problem.path: problem.message for problem in warnings(loaded(text))}
    assert result in found[f"autoscale.pools.default.{path}"]


@pytest.mark.parametrize(
    ("actuator", "is_warned_of"),
    [
        ("{type: compose, targets: {prefill: p}}", True),
        ("{type: kubernetes, targets: {prefill: StatefulSet/p}}", True),
        ("{type: kubernetes, targets: {prefill: apps/v1/statefulsets/p}}", True),
        ("{type: kubernetes, targets: {prefill: deployment/p}}", False),
        ("{type: exec, command: [scale], roles: [prefill]}", False),
    ],
)
def test_a_drain_policy_that_the_platform_ignores_is_warned_of(actuator: str, is_warned_of: bool) -> None:
    found = {problem.path: problem.message for problem in warnings(loaded(ACTING % actuator))}
    assert ("autoscale.pools.default.drain.policy" in found) is is_warned_of
    corrected = loaded(ACTING % actuator + "    drain: {policy: highest-ordinal}\n")
    assert [problem.path for problem in warnings(corrected)] == []


def test_drains_are_longer_for_decode() -> None:
    drain = loaded(ACTING % "null").pools["default"].drain
    assert (drain.policy, drain.patience("prefill"), drain.patience("decode")) == ("least-loss", 300.0, 900.0)
