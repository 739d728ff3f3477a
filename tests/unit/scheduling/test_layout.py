"""Declared plugins without a reference are reported."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.registry import Registry
from proxy.scheduling.document import read
from proxy.scheduling.layout import warnings

PLUGINS: list[dict[str, Any]] = [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer", "name": "kv"}]


def warned(*plugins: dict[str, Any], profiles: list[list[str]] | None = None) -> list[str]:
    document: dict[str, Any] = {"plugins": [*PLUGINS, *plugins]}
    if profiles is not None:
        document["schedulingProfiles"] = [
            {"name": f"p{at}", "plugins": [{"pluginRef": ref} for ref in refs]} for at, refs in enumerate(profiles)
        ]
    return list(warnings(read(document, "scheduling"), Registry.discover()))


def test_a_scorer_without_a_profile_is_unused() -> None:
    assert warned(profiles=[["queue-scorer"]]) == [
        "scheduling.plugins.kv: no profile refers to it, so it has no effect."
    ]


@pytest.mark.parametrize("profiles", [None, [["queue-scorer", "kv"]], [["queue-scorer"], ["kv"]]])
def test_a_plugin_in_a_profile_is_used(profiles: list[list[str]] | None) -> None:
    assert warned(profiles=profiles) == []


@pytest.mark.parametrize("type_name", ["approx-prefix-cache-producer", "single-profile-handler", "random-picker"])
def test_a_plugin_that_runs_without_a_reference_is_used(type_name: str) -> None:
    assert warned({"type": type_name}, profiles=[["queue-scorer", "kv"]]) == []


def test_a_picker_is_unused_if_each_profile_has_another() -> None:
    found = warned(
        {"type": "random-picker"}, {"type": "max-score-picker"}, profiles=[["queue-scorer", "kv", "random-picker"]]
    )
    assert [sentence.partition(":")[0] for sentence in found] == ["scheduling.plugins.max-score-picker"]
