from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bench import disagg
from bench.disagg import DECIDERS, FIGURES, FLEETS, Cell
from bench.placement.experiment import Experiment
from bench.placement.generators import generate
from bench.placement.scenario import Scenario


def found(policy: str, fleet: str, tmp_path: Path, mix: str = "2000+50") -> dict[str, float]:
    experiment = Experiment(Scenario(pods=disagg.PODS), generator=mix, requests=80, seeds=1, known_capacity=20.0)
    (run,) = disagg._runs(experiment, tmp_path, fleet, policy, 0.5)
    return run


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("policy", DECIDERS)
def test_every_policy_runs_on_every_fleet(fleet: str, policy: str, tmp_path: Path) -> None:
    shares = {"whole": (0.0, 0.0), "always": (1.0, 1.0)}
    least, most = shares.get(policy, (0.0, 1.0))
    assert least <= found(policy, fleet, tmp_path)["split"] <= most


def test_the_threshold_splits_long_prompts_only(tmp_path: Path) -> None:
    assert found("threshold", "2P2D", tmp_path, "200+20")["split"] == 0.0
    assert found("threshold", "2P2D", tmp_path, "2000+20")["split"] == 1.0


def test_lengths_have_the_mean_of_their_name() -> None:
    jobs = generate("1000+100", 500, 10.0, Random(1)).jobs
    assert len(jobs) == 500
    assert sum(job.prompt_tokens for job in jobs) / 500 == pytest.approx(1000, rel=0.05)
    assert sum(job.output_tokens for job in jobs) / 500 == pytest.approx(100, rel=0.05)


def cell(seconds: tuple[float, float, float], good: tuple[float, float, float]) -> Cell:
    names = (*disagg.SIMPLE, "predicted")
    return Cell(
        "mix",
        "2P2D",
        0.5,
        {
            name: [
                dict.fromkeys(FIGURES, 0.0) | {"e2e_mean": time * seed, "goodput": share} for seed in (1.0, 1.1, 1.2)
            ]
            for name, time, share in zip(names, seconds, good, strict=True)
        },
    )


@pytest.mark.parametrize(
    ("seconds", "good", "kept"),
    [
        ((2.0, 1.0, 1.02), (0.5, 0.9, 0.88), True),
        ((1.0, 2.0, 0.5), (0.9, 0.5, 0.95), True),
        ((2.0, 1.0, 1.05), (0.5, 0.9, 0.95), False),
        ((1.0, 2.0, 0.9), (0.9, 0.5, 0.85), False),
    ],
)
def test_results_worse_than_the_better_simple_policy_are_marked(
    seconds: tuple[float, float, float], good: tuple[float, float, float], kept: bool
) -> None:
    (row,) = disagg._verdict([cell(seconds, good)])
    assert ("<--" in row[-1]) is not kept


def test_a_chart_shows_the_fleet_without_and_with_splitting() -> None:
    cells = [cell((2.0, 1.0, 1.0), (0.5, 0.9, 0.9))]
    for chart in disagg._charts(cells):
        assert set(chart.series) == {"2P2D, always", "2P2D, predicted"}
