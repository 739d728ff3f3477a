"""The page on autoscaling has every key and every reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from proxy.autoscale.behavior import Behavior, Panic, ScaleDown, ScaleUp
from proxy.autoscale.demand import Metric
from proxy.autoscale.policy import Cause, Coordination, Signal
from proxy.autoscale.settings import AutoscaleSettings, CoordinationSettings, RoleSettings, ScalingPolicy
from proxy.core.params import yaml_key

PAGE = (Path(__file__).parents[3] / "docs" / "autoscaling.md").read_text()
SECTIONS = (AutoscaleSettings, ScalingPolicy, RoleSettings, Metric, Behavior, ScaleUp, ScaleDown, Panic, Coordination)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_named(section: Any) -> None:
    assert [key for item in dataclasses.fields(section) if f"`{(key := yaml_key(item))}`" not in PAGE] == []


def test_the_keys_of_a_signal_are_named() -> None:
    assert f"{{{', '.join(yaml_key(item) for item in dataclasses.fields(Signal))}}}" in PAGE


@pytest.mark.parametrize("reason", Cause, ids=lambda reason: reason.value)
def test_every_reason_is_explained(reason: Cause) -> None:
    assert f"`{reason.value}`" in PAGE


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("`hysteresisPercent`", CoordinationSettings().hysteresis_percent),
        ("`pressureFloor`", CoordinationSettings().pressure_floor),
        ("`baseline`, `alpha`", f"`{CoordinationSettings().baseline}`, {CoordinationSettings().alpha}"),
        ("`tolerancePercent`", ScalingPolicy(()).tolerance_percent),
        ("`scaleDown`", f"`instances` {ScaleDown().instances}, `percent` {ScaleDown().percent}"),
        ("`scaleUp`", f"`instances` {ScaleUp().instances}, `percent` {ScaleUp().percent}"),
    ],
)
def test_a_documented_default_is_the_default(row: str, value: Any) -> None:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    assert f"| {row} | {shown}" in PAGE
