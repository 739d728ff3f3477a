"""Which series of an exposition is meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.fleet.series import MetricSpec, Sample, parse_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a:b_c1", MetricSpec("a:b_c1")),
        ("  a  ", MetricSpec("a")),
        ("a{k=v}", MetricSpec("a", (("k", "v"),))),
        (' a { k = v , k2 = "v 2" } ', MetricSpec("a", (("k", "v"), ("k2", "v 2")))),
        ('a{k="x,}=y"}', MetricSpec("a", (("k", "x,}=y"),))),
    ],
)
def test_a_spec_is_a_name_and_labels(text: str, spec: MetricSpec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_spec_is_not_scraped(text: str) -> None:
    assert parse_spec(text) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{k=v}", "begin with the name"),
        ("a b", "begin with the name"),
        ("1a", "begin with the name"),
        ("a{k=v", "closing brace"),
        ("a{k=v}x", "goes on"),
        ("a{}", "label=value"),
        ("a{k}", "label=value"),
        ("a{=v}", "label=value"),
        ("a{k=}", "label=value"),
        ('a{k=""}', "label=value"),
        ('a{k="v}', "label=value"),
        ("a{k=v,}", "label=value"),
        ("a{k=v,,l=w}", "label=value"),
        ("a{k=v l=w}", "commas"),
    ],
)
def test_a_malformed_spec_is_refused_with_its_fault(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_spec(text)


@given(st.text())
def test_any_text_is_a_spec_or_a_value_error(text: str) -> None:
    message = ""
    try:
        parse_spec(text)
    except ValueError as error:
        message = str(error)
    assert not message or repr(text) in message


def test_a_spec_selects_the_series_that_have_at_least_its_labels() -> None:
    both, one, bare = Sample(b'k="v",l="w"', 1), Sample(b'k="v"', 2), Sample(b"", 3)
    samples = {"a": [both, one, bare]}
    assert MetricSpec("a").select(samples) == [both, one, bare]
    assert MetricSpec("a", (("k", "v"),)).select(samples) == [both, one]
    assert MetricSpec("a", (("l", "w"), ("k", "v"))).select(samples) == [both]
    assert MetricSpec("b", (("k", "v"),)).select(samples) == []


def test_labels_are_unescaped() -> None:
    sample = Sample(rb'a="say \"hi\", {you}\\", b="line\nline"', 1)
    assert sample.labels == {"a": 'say "hi", {you}\\', "b": "line\nline"}
