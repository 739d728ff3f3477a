"""How much better one configuration did than another on the same requests, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from proxy.lab.figures import Fared, mean, percentile

NEVER = 120.0
"""Seconds that a request without an answer counts as."""

BLOCKS = 50
"""Into so many pieces the requests of a run are cut: neighbours wait for each other, so they are drawn together."""

DRAWS = 500

Run = Sequence[Fared]

Objective = Callable[[Run], float]
"""What is to become less."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Of `before`, the share by which `after` is less; `low` and `high` bound it in 95 of 100 cases."""

    before: float
    after: float
    share: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        return self.low > 0.0


def ttft_mean(found: Run) -> float:
    return mean([min(one.ttft, NEVER) for one in found])


def ttft_p90(found: Run) -> float:
    return percentile(sorted(min(one.ttft, NEVER) for one in found), 0.9)


def e2e_mean(found: Run) -> float:
    return mean([min(one.e2e, NEVER) for one in found])


def missed(found: Run) -> float:
    """The share that did not keep its objectives."""
    return 1.0 - sum(one.is_good for one in found) / len(found)


OBJECTIVES: Mapping[str, tuple[Objective, str]] = MappingProxyType(
    {
        "ttft": (ttft_mean, "mean time to first token, s"),
        "ttft-p90": (ttft_p90, "90th percentile of the time to first token, s"),
        "e2e": (e2e_mean, "mean time to the last token, s"),
        "goodput": (missed, "share of requests that miss their objectives"),
    }
)
"""By the name that `kvlane tune` knows."""


def gain(before: Sequence[Run], after: Sequence[Run], objective: Objective, rng: Random) -> Gain:
    """Each has a list of the same requests per run. The interval is that of a bootstrap over blocks of requests, the
    same blocks of both."""
    pairs = [pair for runs in zip(before, after, strict=True) for pair in zip(*map(_blocks, runs), strict=True)]
    drawn = sorted(_share(objective, rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    was, will = _both(objective, pairs)
    return Gain(was, will, _share(objective, pairs), percentile(drawn, 0.025), percentile(drawn, 0.975))


def _blocks(found: Run) -> list[Run]:
    size = max(1, math.ceil(len(found) / BLOCKS))
    return [found[start : start + size] for start in range(0, len(found), size)]


def _share(objective: Objective, pairs: Sequence[tuple[Run, Run]]) -> float:
    was, will = _both(objective, pairs)
    return (was - will) / was if was else 0.0


def _both(objective: Objective, pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float]:
    before, after = ([one for block in blocks for one in block] for blocks in zip(*pairs, strict=True))
    return objective(before), objective(after)
