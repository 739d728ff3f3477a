"""The parts of the measurement on real engines that need none."""

from __future__ import annotations

from argparse import Namespace
from random import Random

import pytest

from bench.real import NEW, POLICIES, ROUND_ROBIN, Turn, hit_rate, rows, seconds_per_token, talks

OPTIONS = Namespace(users=4, think=6.0)


def test_different_words_change_only_the_text() -> None:
    one, other = (talks(Random(3), Random(words), OPTIONS) for words in (1, 2))
    assert one != other
    assert [talk.pauses for talk in one] == [talk.pauses for talk in other]
    assert [len(talk.system.split()) for talk in one] == [len(talk.system.split()) for talk in other]
    assert talks(Random(3), Random(1), OPTIONS) == one


def test_the_cost_of_a_token_is_the_slope_of_the_medians() -> None:
    probes = {new: [0.01 + new * 2e-4, 0.01 + new * 2e-4, 9.0] for new in NEW}
    assert seconds_per_token(probes) == pytest.approx(2e-4)


def test_the_hit_rate_is_over_all_tokens() -> None:
    assert hit_rate([Turn(0.1, 1_000, 900, "a"), Turn(0.1, 3_000, 100, "a")]) == 0.25


def test_the_predicted_gain_is_shown_with_the_measured_one() -> None:
    probes = {new: [new * 1e-4] for new in NEW}
    runs = {
        "default": [[Turn(0.05, 2_000, 1_600, "a")], [Turn(0.06, 2_000, 1_600, "a")]],
        ROUND_ROBIN: [[Turn(0.11, 2_000, 1_000, "a")], [Turn(0.14, 2_000, 1_000, "b")]],
    }
    default, round_robin, promised, found = rows(runs, probes)[1:]
    assert list(runs) == list(POLICIES)
    assert (default[2], default[5], default[6]) == ("55 ms", "80.0%", "400")
    assert (round_robin[2], round_robin[5], round_robin[6]) == ("125 ms", "50.0%", "1000")
    assert promised[0] == "promised by hits, at 100 us a token"
    assert promised[2] == "-60 ms (by seed -60, -60)"
    assert found[2] == "-70 ms (by seed -60, -80)"
