"""What came of one load before one fleet, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.placement.report import Figures, Objectives, per_token, percentile
from bench.scaling.fleet import ROLES
from bench.scaling.scene import SAMPLE, Moment
from proxy.lab.simulation import SimulationOutcome

OBJECTIVES = Objectives(first_token=2.0, per_token=0.04)


@dataclass(frozen=True, slots=True)
class Played:
    """`moments` are times of the load, `moves` the replicas that were added or removed."""

    outcomes: Sequence[SimulationOutcome]
    moments: Sequence[Moment]
    moves: int


def figures(played: Played, objectives: Objectives = OBJECTIVES) -> Figures:
    """Over all requests. GPU hours count pods that start, serve or drain while the load lasts. A turn is a role
    that grows after it shrank, or the reverse."""
    attained = sum(_is_good(one, objectives) for one in played.outcomes) / len(played.outcomes)
    hours = SAMPLE * sum(moment.gpus for moment in played.moments) / 3600
    first = sorted(one.first_token - one.job.arrival for one in played.outcomes if one.first_token is not None)
    return {
        "requests": len(played.outcomes),
        "lost": sum(one.ended is None for one in played.outcomes),
        "attained": attained,
        "gpu_hours": hours,
        "attained_per_gpu_hour": attained / hours,
        "moves": played.moves,
        "turns": sum(_turns([moment.wanted[role] for moment in played.moments]) for role in ROLES),
        "ttft_p50": percentile(first, 0.5),
        "ttft_p90": percentile(first, 0.9),
    }


def _is_good(one: SimulationOutcome, objectives: Objectives) -> bool:
    if one.ended is None or one.first_token is None:
        return False
    soon = one.first_token - one.job.arrival <= objectives.first_token
    return soon and (one.job.output_tokens == 1 or per_token(one) <= objectives.per_token)


def _turns(sizes: Sequence[int]) -> int:
    steps = [after - before for before, after in pairwise(sizes) if after != before]
    return sum(one * other < 0 for one, other in pairwise(steps))
