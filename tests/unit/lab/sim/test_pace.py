from __future__ import annotations

import statistics

import pytest

from proxy.lab.sim import SimConfig, SimEngine, StepTiming
from proxy.lab.sim.config import HARDWARE
from proxy.lab.sim.engine import Pace
from tests.helpers.lab.sim.support import run, sequence


def test_a_long_prompt_costs_its_tokens_and_their_attention() -> None:
    timing = StepTiming(base=0.0, per_prefill_token=0.0, per_sequence=0.0, per_attended=1e-3)
    engine = SimEngine(SimConfig(timing=timing, max_num_batched_tokens=100))
    engine.submit(sequence(200), now=0.0)
    assert engine.step(0.0)[1] == pytest.approx(1e-3 * 100 * 101 / 2)
    assert engine.step(0.0)[1] == pytest.approx(1e-3 * (100 * 100 + 100 * 101 / 2))


def test_decoding_costs_the_kv_cache_that_it_reads() -> None:
    timing = StepTiming(base=0.0, per_prefill_token=0.0, per_sequence=0.0, per_token_read=1e-3)
    engine = SimEngine(SimConfig(timing=timing))
    engine.submit(sequence(100, 3), now=0.0)
    assert [engine.step(0.0)[1] for _ in range(3)] == pytest.approx([0.0, 0.101, 0.102])


def test_a_slow_pod_takes_proportionally_longer() -> None:
    ends = []
    for slowdown in (1.0, 3.0):
        engine = SimEngine(SimConfig(slowdown=slowdown))
        engine.submit(sequence(500, 20), now=0.0)
        ends.append(run(engine))
    assert ends[1] == pytest.approx(3 * ends[0])


def test_noise_has_the_mean_of_the_steps_without_it_and_the_configured_deviation() -> None:
    pace = Pace(SimConfig(noise=0.3, noise_seed=7))
    factors = [pace.factor() for _ in range(20_000)]
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(factors) == pytest.approx(0.3, abs=0.01)
    assert min(factors) > 0.0


def test_pods_with_other_seeds_have_other_noise() -> None:
    one, same, other = (Pace(SimConfig(noise=0.3, noise_seed=seed)) for seed in (1, 1, 2))
    drawn = one.factor()
    assert same.factor() == drawn
    assert other.factor() != drawn


@pytest.mark.parametrize(
    ("name", "flop_per_second", "bytes_per_second", "parameters", "weights"),
    [
        ("a100-llama-3.1-8b", 312e12, 2.04e12, 6.98e9, 16.1e9),
        ("h100-llama-3.1-8b", 989e12, 3.35e12, 6.98e9, 16.1e9),
        ("h100-tp4-llama-3.3-70b", 4 * 989e12, 4 * 3.35e12, 68.5e9, 141e9),
    ],
)
def test_no_hardware_is_faster_than_its_data_sheet(
    name: str, flop_per_second: float, bytes_per_second: float, parameters: float, weights: float
) -> None:
    """Parameters without embeddings: two FLOP each for a token of a prompt; all weights are read in a step."""
    timing = HARDWARE[name].timing
    assert timing.per_prefill_token > 2 * parameters / flop_per_second
    assert timing.base > weights / bytes_per_second
