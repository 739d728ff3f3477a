"""Dataclasses from YAML: strict, and with every fault at once."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.errors import ConfigError
from proxy.core.params import Duration, FromEnvironment, Size, load, param, yaml_key


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    required: str = param(doc="must be there")
    depth: int = param(1, "how deep", at_least=0, at_most=10)


@dataclass(frozen=True, slots=True)
class Outer:
    flag: bool = param(False, "a flag")
    whole_number: int = param(3, "a count", at_least=1)
    share: float = param(0.5, "a share", more_than=0, aliases=("part",))
    name: str = param("x", "a name")
    ttft: float = param(1.0, "with a key of its own", key="maxTTFT")
    wait: Duration = param(Duration(1.0), "a time")
    space: Size = param(Size(5), "a size")
    colour: Colour = param(Colour.RED, "an enum")
    mode: Literal["Pass", "Fail"] = param("Pass", "a choice")
    limit: int | None = param(None, "maybe a count")
    either: int | str = param(0, "a count or a text")
    inner: Inner = field(default_factory=lambda: Inner(required="y"))
    many: tuple[Inner, ...] = param((), "a list")
    tags: frozenset[str] = param(frozenset(), "a set")
    labels: Mapping[str, int] = param({}, "a mapping")
    anything: Any = param(None, "whatever")


def faults(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Outer, data, "top")
    return [str(problem) for problem in caught.value.problems]


def test_an_empty_mapping_gives_the_defaults() -> None:
    assert load(Outer, None) == load(Outer, {}) == Outer()


def test_mutable_defaults_are_not_shared() -> None:
    assert load(Outer, {}).labels is not load(Outer, {}).labels


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("flag", True, "flag", True),
        ("wholeNumber", 7, "whole_number", 7),
        ("wholeNumber", 7.0, "whole_number", 7),
        ("part", 0.25, "share", 0.25),
        ("maxTTFT", 2, "ttft", 2.0),
        ("name", 12, "name", "12"),
        ("wait", "250ms", "wait", 0.25),
        ("wait", 2, "wait", 2.0),
        ("space", "1Ki", "space", 1024),
        ("colour", "Blue", "colour", Colour.BLUE),
        ("mode", "fail", "mode", "Fail"),
        ("limit", None, "limit", None),
        ("limit", 4, "limit", 4),
        ("either", "text", "either", "text"),
        ("many", [{"required": "a"}], "many", (Inner(required="a"),)),
        ("tags", ["a", "a"], "tags", frozenset({"a"})),
        ("labels", {"a": 1}, "labels", {"a": 1}),
        ("anything", [1, {}], "anything", [1, {}]),
    ],
)
def test_values_are_converted_to_their_annotation(key: str, value: Any, name: str, expected: Any) -> None:
    assert getattr(load(Outer, {key: value}), name) == expected


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"wholNumber": 3}, "top: unknown field 'wholNumber'; did you mean 'wholeNumber'?"),
        ({"whole_number": 3}, "top: unknown field 'whole_number'; did you mean 'wholeNumber'?"),
        (
            {"zzz": 3},
            "top: unknown field 'zzz'; known are flag, wholeNumber, share, part, name, maxTTFT, wait, space, colour, "
            "mode, limit, either, inner, many, tags, labels, anything",
        ),
        ({"flag": "yes"}, "top.flag: must be true or false, not the text 'yes'"),
        ({"flag": 1}, "top.flag: must be true or false, not 1"),
        ({"wholeNumber": True}, "top.wholeNumber: must be a whole number, not true"),
        ({"wholeNumber": 1.5}, "top.wholeNumber: must be a whole number, not 1.5"),
        ({"wholeNumber": math.inf}, "top.wholeNumber: must be a whole number, not inf"),
        ({"wholeNumber": math.nan}, "top.wholeNumber: must be a whole number, not nan"),
        ({"wholeNumber": 0}, "top.wholeNumber: must be at least 1, not 0"),
        ({"part": 0}, "top.part: must be more than 0, not 0"),
        ({"maxTTFT": math.inf}, "top.maxTTFT: must be a finite number, not inf"),
        ({"maxTTFT": 10**400}, f"top.maxTTFT: must be a finite number, not {10**400}"),
        ({"name": None}, "top.name: must be text, not nothing"),
        ({"wait": "soon"}, "top.wait: 'soon' is not a duration; write 250ms, 15s, 5m, 1h30m or 7d"),
        ({"wait": -1}, "top.wait: a duration is not negative"),
        ({"wait": "-1s"}, "top.wait: a duration is not negative"),
        ({"wait": "1h 30m"}, "top.wait: '1h 30m' is not a duration; write 1h30m"),
        ({"wait": "$WAIT"}, "top.wait: '$WAIT' is not a duration; write ${WAIT}"),
        ({"space": "$SPACE"}, "top.space: '$SPACE' is not a size; write ${SPACE}"),
        ({"flag": "true"}, "top.flag: must be true or false, not the text 'true'; write true without quotes"),
        ({"wholeNumber": "$N"}, "top.wholeNumber: must be a whole number, not the text '$N'; write ${N}"),
        ({"wholeNumber": "08"}, "top.wholeNumber: must be a whole number, not the text '08'; write 8 without quotes"),
        ({"maxTTFT": "0.5"}, "top.maxTTFT: must be a finite number, not the text '0.5'; write 0.5 without quotes"),
        ({"inner": {"required": "a", "depth": 10**20}}, f"top.inner.depth: must be at most 10, not {10**20}"),
        ({"space": -1}, "top.space: a size is not negative"),
        ({"colour": "redd"}, "top.colour: must be one of red, blue, not 'redd'; did you mean 'red'?"),
        ({"inner": {"depth": 11, "required": "x"}}, "top.inner.depth: must be at most 10, not 11"),
        ({"inner": {}}, "top.inner.required: is required"),
        ({"inner": []}, "top.inner: must be a mapping, not a list; its keys are required, depth"),
        ({"many": {}}, "top.many: must be a list, not a mapping; begin each item with '- '"),
        ({"many": "abc"}, "top.many: must be a list, not the text 'abc'; write [abc]"),
        ({"labels": {"a": "x"}}, "top.labels.a: must be a whole number, not the text 'x'"),
        ([], "top: must be a mapping, not a list; its keys are flag, wholeNumber, share, name, …"),
    ],
)
def test_a_fault_has_its_path_and_the_expected_value(data: Any, fault: str) -> None:
    assert faults(data) == [fault]


def test_all_faults_are_reported_at_once() -> None:
    data = {"flag": 1, "nme": "x", "many": [{"depth": -1}, {"required": "ok"}, {"required": []}]}
    assert faults(data) == [
        "top: unknown field 'nme'; did you mean 'name'?",
        "top.flag: must be true or false, not 1",
        "top.many[0].required: is required",
        "top.many[0].depth: must be at least 0, not -1",
        "top.many[2].required: must be text, not a list",
    ]


def test_an_error_of_a_class_has_the_path_of_the_class() -> None:
    @dataclass(frozen=True)
    class Picky:
        value: int = 0

        def __post_init__(self) -> None:
            raise ValueError("never")

    with pytest.raises(ConfigError, match=r"^here: never$"):
        load(Picky, {"value": 1}, "here")


def test_an_error_of_a_class_that_starts_with_a_key_has_the_path_of_the_key() -> None:
    @dataclass(frozen=True)
    class Picky:
        wanted_value: int = 0

        def __post_init__(self) -> None:
            raise ValueError("wantedValue: is odd: 1")

    with pytest.raises(ConfigError, match=r"^here\.wantedValue: is odd: 1$"):
        load(Picky, {"wantedValue": 1}, "here")


def test_text_from_the_environment_may_stand_for_numbers_durations_and_booleans() -> None:
    texts = {"wholeNumber": "7", "flag": "true", "wait": "2", "space": "8"}
    loaded = load(Outer, {key: FromEnvironment(text) for key, text in texts.items()})
    assert (loaded.whole_number, loaded.flag, loaded.wait, loaded.space) == (7, True, 2.0, 8)
    assert load(Outer, {"wait": FromEnvironment("250ms")}).wait == 0.25
    assert faults({"wholeNumber": "7"}) == [
        "top.wholeNumber: must be a whole number, not the text '7'; write 7 without quotes"
    ]


def test_keys_are_the_camel_case_of_the_field_unless_overridden() -> None:
    fields = {one.name: yaml_key(one) for one in Outer.__dataclass_fields__.values()}
    assert (fields["whole_number"], fields["ttft"], fields["flag"]) == ("wholeNumber", "maxTTFT", "flag")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from([yaml_key(one) for one in Outer.__dataclass_fields__.values()]) | st.text()


@given(st.dictionaries(keys, json_values, max_size=4) | json_values)
def test_any_value_is_loaded_or_refused_with_a_message(data: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load(Outer, data), Outer)
