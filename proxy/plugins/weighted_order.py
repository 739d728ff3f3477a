"""A random order in which items with larger weights tend to come first."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

from proxy.core.decision import ScoredEndpoint
from proxy.core.ports import Random

SMALLEST = 1e-10
"""Replaces a draw of 0, which has no logarithm."""


def weighted_order(scored: Sequence[ScoredEndpoint], weights: Sequence[float], random: Random) -> list[ScoredEndpoint]:
    """Return the items in random order. The first is drawn with probability weight / sum; items without weight come
    last, in random order."""
    keys = [(weighted_draw(weight, random), random.random()) for weight in weights]
    return [scored[index] for index in sorted(range(len(scored)), key=keys.__getitem__)]


def weighted_draw(weight: float, random: Random) -> float:
    """Return sort keys whose ascending order is that of Efraimidis and Spirakis' A-Res, descending u ** (1 / weight):
    they are the negated logarithms of its keys, which do not underflow."""
    return -log(random.random() or SMALLEST) / weight if weight > 0 else inf
