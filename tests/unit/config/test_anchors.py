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
def test_anchors_in_anchors_are_refused_before_they_are_written_out(line: str) -> None:
    assert faults(nested(40, line)) == ["kvlane.yaml: its anchors stand for more than 1000000 values"]


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "a: " + "[" * 5000, "a: " + "[" * 101 + "]" * 101])
def test_what_holds_itself_or_has_no_end_of_depth_is_refused(text: str) -> None:
    assert faults(text) == ["kvlane.yaml: is nested too deeply, or in itself"]


def test_nobody_nests_a_hundred_brackets_but_may() -> None:
    assert yaml_source.read("[" * 100 + "]" * 100, "", {})


def test_ordinary_anchors_are_written_out() -> None:
    text = "a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}\n"
    assert yaml_source.read(text, "", {}) == {"a": {"x": 1}, "b": [{"x": 1}] * 2, "c": {"x": 1, "y": 2}}


def test_a_key_is_text_whatever_else_yaml_would_read_it_as() -> None:
    assert yaml_source.read("retries: {on: [on, connect], no: yes}\n", "", {}) == {
        "retries": {"on": [True, "connect"], "no": True}
    }


@pytest.mark.parametrize("text", ['a: "\\ud800"\n', '"\\udc00": 1\n'])
def test_half_a_surrogate_pair_is_no_text(text: str) -> None:
    [fault] = faults(text)
    assert fault.startswith("kvlane.yaml:1:")
    assert fault.endswith("half a surrogate pair is no text")
