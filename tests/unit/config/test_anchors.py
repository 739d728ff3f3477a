"""Texts that YAML allows and no configuration can be: more than there is memory, without an end, or no text."""

from __future__ import annotations

import pytest

from proxy import yaml_source
from proxy.core.errors import ConfigError


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        yaml_source.read(text, "kvlane.yaml", {})
    return [str(problem) for problem in caught.value.problems]


def nested(levels: int, line: str) -> str:
    first = "l0: &l0 {a: [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n"
    return first + "".join(line.format(at=at, before=f"*l{at - 1}") for at in range(1, levels))


@pytest.mark.parametrize(
    "line",
    [
        "l{at}: &l{at} [{before}, {before}, {before}, {before}, {before}, {before}, {before}, {before}]\n",
        "l{at}: &l{at} {{<<: [{before}, {before}, {before}, {before}, {before}, {before}], b: {before}}}\n",
    ],
)
def test_nested_anchors_are_refused_before_expansion(line: str) -> None:
    assert faults(nested(40, line)) == ["kvlane.yaml: its anchors stand for more than 1000000 values"]


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "a: " + "[" * 5000, "a: " + "[" * 101 + "]" * 101])
def test_recursive_and_too_deep_values_are_refused(text: str) -> None:
    assert faults(text) == ["kvlane.yaml: is nested too deeply, or in itself"]


def test_a_hundred_nested_brackets_are_accepted() -> None:
    assert yaml_source.read("[" * 100 + "]" * 100, "", {})


def test_ordinary_anchors_are_expanded() -> None:
    text = "a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}\n"
    assert yaml_source.read(text, "", {}) == {"a": {"x": 1}, "b": [{"x": 1}] * 2, "c": {"x": 1, "y": 2}}


def test_a_key_is_text_even_if_yaml_reads_another_type() -> None:
    assert yaml_source.read("retries: {on: [on, connect], no: yes}\n", "", {}) == {
        "retries": {"on": [True, "connect"], "no": True}
    }


@pytest.mark.parametrize("text", ['a: "\\ud800"\n', '"\\udc00": 1\n'])
def test_a_lone_surrogate_is_invalid(text: str) -> None:
    [fault] = faults(text)
    assert fault.startswith("kvlane.yaml:1:")
    assert fault.endswith("half a surrogate pair is no text")
