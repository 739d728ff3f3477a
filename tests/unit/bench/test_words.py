"""The check of words finds private words in names and prose, and leaves code and other words alone."""

from __future__ import annotations

import pytest

from bench.words import Allowance, Finding, in_page, in_source


def words(text: str) -> list[tuple[int, str]]:
    return [(found.line, found.word) for found in in_source("a.py", text)]


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def leg_of(): ...", "leg"),
        ("class OpenLegs: ...", "legs"),
        ("def f(nobody): ...", "nobody"),
        ("x.heard = 1", "heard"),
        ('"""Return what the pod answered."""', "answered"),
        ("x = 1  # nobody comes", "nobody"),
        ('log.error("the store is away, going on")', "is away"),
    ],
)
def test_a_private_word_is_found(source: str, word: str) -> None:
    assert words(source) == [(1, word)]


@pytest.mark.parametrize(
    "source",
    [
        "legend = 1",
        "def lookup(): ...",
        'KEY = "x-answer"',
        '"""Send `answer` to the client."""',
        "x = other.told",
    ],
)
def test_plain_words_and_code_are_left_alone(source: str) -> None:
    assert words(source) == []


def test_a_finding_has_the_line_of_its_word() -> None:
    assert words('"""A line.\n\nAnother one that nobody reads."""') == [(3, "nobody")]


def test_blocks_of_code_on_a_page_are_left_alone() -> None:
    page = "Text.\n```sh\necho nobody\n```\nAnd nobody.\n"
    assert [(found.line, found.word) for found in in_page("a.md", page)] == [(5, "nobody")]


def test_an_allowance_is_for_a_folder_and_a_word() -> None:
    allowed = Allowance("proxy/http", "leg")
    assert allowed.covers(Finding("proxy/http/relay.py", 1, "leg", "attempt"))
    assert not allowed.covers(Finding("proxy/http/relay.py", 1, "heard", "received"))
    assert not allowed.covers(Finding("proxy/https.py", 1, "leg", "attempt"))
