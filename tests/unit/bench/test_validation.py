"""The parts of the comparison with a real engine that need none."""

from __future__ import annotations

from random import Random

import pytest

from bench.validation.calibrate import DECODED, constants, fitted
from bench.validation.script import Session, Turn, ids, script
from bench.validation.simulated import Simulated
from proxy.lab.sim import SimConfig, StepTiming

TIMING = StepTiming(
    base=0.004, per_prefill_token=0.000_05, per_sequence=0.000_2, per_attended=2e-8, per_token_read=5e-7
)


def test_a_fit_recovers_its_parameters() -> None:
    rows = [(1.0, float(x), float(x * x)) for x in (1, 3, 10, 40, 90)]
    assert fitted(rows, [2 + 0.5 * x + 0.01 * xx for _, x, xx in rows]) == pytest.approx([2, 0.5, 0.01])


def test_a_fit_leaves_out_negative_terms() -> None:
    rows = [(1.0, float(x), float(x * x)) for x in (1, 3, 10, 40, 90)]
    found = fitted(rows, [2 + 0.5 * x - 0.001 * xx for _, x, xx in rows])
    assert found[2] == 0.0
    assert min(found) >= 0.0


def test_the_constants_of_an_engine_are_fitted_to_its_times() -> None:
    budget = 512
    alone = {
        n: 0.01 + TIMING.step(n, 1, n * (n + 1) / 2) + (-(-n // budget) - 1) * TIMING.step(0, 1)
        for n in (32, 400, 1_500, 6_000)
    }
    together = {(k, n): TIMING.step(0, k, 0, round(k * (n + DECODED / 2))) for k in (1, 4, 16) for n in (32, 2_000)}
    found = constants(alone, together, budget)
    assert found.overhead == pytest.approx(0.01)
    for name in ("base", "per_prefill_token", "per_sequence", "per_attended", "per_token_read"):
        assert getattr(found.timing, name) == pytest.approx(getattr(TIMING, name), rel=1e-3)


def test_different_words_change_only_the_text() -> None:
    one, other = (script(3, words, 40, 2.0) for words in (1, 2))
    assert one != other
    assert shape(one) == shape(other) != shape(script(4, 1, 40, 2.0))
    assert script(3, 1, 40, 2.0) == one


def shape(sessions: list[Session]) -> list[tuple[float, list[tuple[float, int, int]]]]:
    return [(one.begins, [(t.pause, len(t.added), t.output_tokens) for t in one.turns]) for one in sessions]


def test_the_simulated_engine_continues_from_its_own_responses() -> None:
    rng = Random(1)
    turns = (Turn(0.0, ids(rng, 100), 50), Turn(1.0, ids(rng, 20), 10))
    config = SimConfig(block_size=16, timing=TIMING)
    first, second = Simulated(config, 0.005).play([Session(0.0, turns)])
    assert (first.prompt_tokens, first.cached_tokens) == (100, 0)
    assert (second.prompt_tokens, second.cached_tokens) == (170, 144)
    assert first.first_token == pytest.approx(0.005 + TIMING.step(100, 1, 100 * 101 / 2))
    assert first.per_token == pytest.approx(TIMING.step(0, 1, 0, 126), rel=0.01)
