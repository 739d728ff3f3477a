"""Every preset is a section that loads, and has its effect."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.settings import from_mapping
from proxy.tools import presets

SECTIONS = {
    "picked": presets.picked_by("round-robin-picker"),
    "scored": presets.scored_by({"queue-scorer": 2, "active-request-scorer": 1}),
    "exact": presets.exact(),
    "session": presets.session("x-session-id"),
    "disaggregated": presets.disaggregated(needs_pair=False),
    "pairs": presets.disaggregated(needs_pair=True),
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_it_loads_and_every_plugin_is_used_or_runs_outside_profiles(section: dict[str, Any]) -> None:
    document = from_mapping({"scheduling": section}).scheduling
    assert document.profiles
    used = {ref.plugin_ref for profile in document.profiles for ref in profile.plugins}
    steps = {plugin.type for plugin in document.plugins if plugin.type.endswith(("-scorer", "-filter", "-picker"))}
    assert used == steps


def test_pods_that_need_a_pair_are_always_split() -> None:
    types = {plugin["type"] for plugin in SECTIONS["pairs"]["plugins"]}
    assert "always-disagg-pd-decider" in types
    assert "predicted-latency-pd-decider" not in types
