"""Errors for unknown keys of a file: the section that has the key, or the known keys once."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.load import from_text
from proxy.core.errors import ConfigError


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_text(text, Path("kvlane.yaml"), {})
    return list(map(str, caught.value.problems))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("listen: {connect: 2s}", "listen: unknown field 'connect'; it belongs to reliability.timeouts"),
        ("timeouts: {}", "unknown field 'timeouts'; it belongs to reliability"),
        ("pods: {extproc: {}}", "pods: unknown field 'extproc'; it belongs to the top level"),
        ("port: 8000", "unknown field 'port'; it belongs to listen, admin, extproc, …"),
        ("pools: {large: {timeouts: {}}}", "pools.large: unknown field 'timeouts'; it belongs to reliability"),
        (
            "pods: {interval: 2s}",
            "pods: unknown field 'interval'; it belongs to pods.dns, pods.refresh, pods.refresh.dcgm",
        ),
        ("scheduling: {profiles: []}", "scheduling: unknown field 'profiles'; did you mean 'schedulingProfiles'?"),
        (
            "scheduling: {plugins: [{type: queue-scorer, weight: 2}]}",
            "scheduling.plugins.queue-scorer: unknown field 'weight'; "
            "it belongs to scheduling.schedulingProfiles[].plugins[]",
        ),
        (
            "scheduling: {plugins: [{type: load-aware-scorer, threshold: 2}]}",
            "scheduling.plugins.load-aware-scorer: unknown field 'threshold'; "
            "it belongs to scheduling.plugins.load-aware-scorer.parameters",
        ),
    ],
)
def test_a_key_of_another_section_names_that_section(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_the_known_keys_of_a_mapping_are_listed_once() -> None:
    first, second, third = faults("foo: 1\nbar: 2\nlisten: {foo: 1}")
    assert first.startswith("unknown field 'foo'; known are listen, admin, pods, scheduling, ")
    assert second == "unknown field 'bar'"
    assert third.startswith("listen: unknown field 'foo'; known are host, port, ")


def test_a_file_of_another_program_is_not_repeated_in_the_errors() -> None:
    found = faults("".join(f"{'a long line ' * 20} {number}: text\n" for number in range(40)))
    assert len(found) == 6
    assert found[1] == f"unknown field '{('a long line ' * 20)[:59]}…'"
    assert found[5] == "35 more unknown fields"


def test_a_fault_in_a_scheduling_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "epp.yaml").write_text("plugins: [{type: queue-scorr}]")
    with pytest.raises(ConfigError) as caught:
        from_text("scheduling: {file: epp.yaml}\nlisten: {prot: 1}", tmp_path / "kvlane.yaml", {})
    assert list(map(str, caught.value.problems)) == [
        "listen: unknown field 'prot'; did you mean 'port'?",
        "scheduling.plugins.queue-scorr: unknown plugin type 'queue-scorr'; did you mean 'queue-scorer'? (in epp.yaml)",
    ]


def test_a_reference_to_an_undeclared_plugin_says_which_names_exist() -> None:
    profile = "schedulingProfiles: [{name: a, plugins: [{pluginRef: kv}]}]"
    assert faults(f"scheduling: {{plugins: [{{type: queue-scorer}}], {profile}}}") == [
        "scheduling.schedulingProfiles.a.plugins[0].pluginRef: no plugin is named 'kv'; the names are queue-scorer; "
        "declare it under scheduling.plugins"
    ]
    assert faults(f"scheduling: {{{profile}}}") == [
        "scheduling.schedulingProfiles.a.plugins[0].pluginRef: no plugin is named 'kv'; "
        "declare it under scheduling.plugins"
    ]
