"""Whatever stands in a file that people or other programs write, the loaders raise ConfigError and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proxy import yaml_source
from proxy.auth.authenticator import KeyFile
from proxy.config.load import from_text
from proxy.core.errors import ConfigError
from proxy.fleet.discovery.file import parse_pods
from proxy.tools import imported
from tests.helpers.examples import examples

SCALARS = st.sampled_from(
    [
        *("2030-02-30", "2024-13-45T25:61:61+99:99", "9999-12-31T23:59:59-23:59", "0x", "0b", "0o9", "190:20:30"),
        *(".inf", "-.inf", ".nan", "1e999", "-1", "~", "=", "<<", "on", "''", "ü", "\x85", "${X}", "${", "***"),
        *("'\\ud800'", '"\\ud800"', '"\\0"', "9" * 5000, "1" + ":59" * 500, "[" * 300 + "]" * 300, "http://a:1"),
        *("!!bool x", "!!int ''", "!!int x", "!!float x", "!!timestamp x", "!!null x", "!!binary ü", "!!binary x"),
        *("!!set {a, b}", "!!omap [a: 1]", "!!pairs [a]", "!!map [a]", "!!seq {a: 1}", "!!python/name:os.system"),
        *("!x y", "&a [*a]", "*a", "&a a", "0x" + "f" * 5000),
    ]
)
KEYS = st.sampled_from(
    [
        *("url", "name", "labels", "weight", "models", "engine", "role", "address", "port", "tls", "pods", "static"),
        *("kind", "plugins", "scheduling", "listen", "security", "apiKeys", "key", "limits", "file", "telemetry"),
        *("pools", "autoscale", "policies", "timeouts", "reliability", "host", "<<", "1", "~", "2001-01-01"),
        *("!!bool x", "[a]", "? [a]"),
    ]
)
VALUES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda found: f"[{', '.join(found)}]")
        | st.lists(st.tuples(KEYS, inner), max_size=3).map(
            lambda found: "{" + ", ".join(f"{key}: {value}" for key, value in found) + "}"
        )
    ),
    max_leaves=8,
)
TEXTS = (
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(
        lambda found: "\n".join(f"{key}: {value}" for key, value in found)
    )
    | st.lists(VALUES, max_size=4).map(lambda found: "\n".join(f"- {value}" for value in found))
    | st.text(max_size=30)
)

POD = "- {{url: 'http://a:1', name: a, labels: {{since: {}}}}}"


def _key_file(text: str, folder: Path) -> Any:
    path = folder / "keys.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return KeyFile(str(path), {}).read()


def _other_program(text: str) -> Any:
    with contextlib.suppress(imported.InvalidDocument):
        return imported.documents(text, "values.yaml")


@settings(deadline=None, max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
@example(POD.format("2030-02-30"))
@example(POD.format("!!timestamp x"))
@example(POD.format("9" * 5000))
@example("- {url: 'http://a:1', weight: .inf}")
@example("- {url: 'http://a:1', weight: 1e999}")
@example("- {url: 'http://[', name: a}")
@example("- {address: a, port: ²}")
@example("[" * 100_000)
@example("- " * 100_000)
def test_any_text_gives_a_configuration_or_a_config_error(tmp_path: Path, text: str) -> None:
    loaders: list[Callable[[], Any]] = [
        lambda: parse_pods(text),
        lambda: from_text(text, tmp_path / "kvlane.yaml", {}),
        lambda: _key_file(text, tmp_path),
        lambda: _other_program(text),
        lambda: yaml_source.read_json(text, "state.json"),
    ]
    for load in loaders:
        with contextlib.suppress(ConfigError):
            load()


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "- &a [*a]"])
def test_depth_is_bounded_for_the_parser_in_c_too(text: str) -> None:
    with pytest.raises(ConfigError, match="is nested too deeply, or in itself"):
        yaml_source.read_data(text)


def test_anchors_are_bounded_for_pods_too() -> None:
    first = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
    more = "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 20))
    with pytest.raises(ConfigError, match="anchors stand for more"):
        yaml_source.read_data(first + more)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{"])
def test_invalid_json_is_refused_with_its_position(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^state\.json: is no JSON"):
        yaml_source.read_json(text, "state.json")


def test_the_error_about_a_document_of_an_earlier_release_names_the_import() -> None:
    with pytest.raises(ConfigError) as caught:
        from_text("kind: EndpointPickerConfig\nplugins: [{type: kv-cache-scorer}]", Path("picker.yaml"), {})
    assert list(map(str, caught.value.problems)) == [
        "scheduling.plugins.kv-cache-scorer: 'kv-cache-scorer' was renamed to kv-cache-utilization-scorer",
    ]
    assert caught.value.hint == (
        "picker.yaml: if it was written for an earlier release of llm-d, `kvlane import endpoint-picker` rewrites it"
    )
    with pytest.raises(ConfigError) as caught:
        from_text(
            "kind: EndpointPickerConfig\nplugins: [{type: prefix-cache-scorer, parameters: {blockSize: 16}}]",
            Path("picker.yaml"),
            {},
        )
    assert "import endpoint-picker" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "kind: EndpointPickerConfg\nplugins: [{type: queue-scorer}]",
        "plugins: [{type: queue-scorer, weight: 2}]",
        "plugins: [{type: queue-scorr}]",
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: max-score-picker}]}]",
    ],
)
def test_a_mistake_in_a_current_document_gets_no_hint_about_earlier_releases(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_text(text, Path("picker.yaml"), {})
    assert (len(caught.value.problems), caught.value.hint) == (1, "")


def test_the_error_about_a_manifest_with_a_document_in_it_names_the_import() -> None:
    wrapped = "kind: ConfigMap\ndata:\n  epp.yaml: |\n    kind: EndpointPickerConfig\n    plugins: []\n"
    with pytest.raises(ConfigError) as caught:
        from_text(wrapped, Path("map.yaml"), {})
    assert caught.value.hint == (
        "map.yaml: it holds an EndpointPickerConfig, which `kvlane import endpoint-picker` takes out of a manifest"
        " or of a chart's values"
    )
    with pytest.raises(ConfigError) as caught:
        from_text("scheduling: {kind: EndpointPickerConfig, plugins: []}\npodz: {}", Path("kvlane.yaml"), {})
    assert "import" not in str(caught.value)
