"""Reading samples and selecting series of an exposition."""

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.exposition import MetricSpec, Sample, SampleReader, alternatives, parse_spec


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


@given(st.lists(st.text("abc_:", min_size=1, max_size=6), min_size=1, max_size=8), st.text("abc_:", max_size=6))
def test_the_pattern_of_names_matches_those_names_and_no_others(names: list[str], other: str) -> None:
    pattern = re.compile(alternatives(set(names)))
    assert all(pattern.fullmatch(name) for name in names)
    assert bool(pattern.fullmatch(other)) == (other in names)


def test_all_samples_are_read_without_names() -> None:
    text = b'# HELP a b\na 1\nb:c{d="e"} 2 1000\r\nb:c{d="f"} NaN\n'
    assert SampleReader().read(text) == {"a": [Sample(b"", 1.0)], "b:c": [Sample(b'{d="e"', 2.0, 1000.0)]}


def test_long_labels_of_pods_are_not_kept() -> None:
    tracemalloc.start()
    try:
        for number in range(40):
            text = b'm{adapters="%d,%b"} 1\n' % (number, b"x" * 60_000)
            (sample,) = SampleReader().read(text)["m"]
            assert sample.labels["adapters"].startswith(f"{number},")
        del text, sample
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 300_000
