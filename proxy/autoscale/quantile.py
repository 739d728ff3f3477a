"""A quantile of what a histogram has counted between two looks at it."""

from __future__ import annotations

import math
from collections.abc import Sequence

Buckets = Sequence[tuple[float, float]]
"""Upper bound -> observations up to it, in the order of the bounds: a Prometheus histogram, the last bound infinite."""


def quantile_between(percentile: float, now: Buckets, past: Buckets = ()) -> float | None:
    """Linear within a bucket; one without an upper bound ends at twice its lower one. None if nothing was observed. An
    empty `past` is the beginning. Raises ValueError if `past` is not an earlier look at the same histogram."""
    if past and [bound for bound, _ in past] != [bound for bound, _ in now]:
        raise ValueError("the buckets have changed")
    before = [count for _, count in past] or [0.0] * len(now)
    counts = [count - old for (_, count), old in zip(now, before, strict=True)]
    if counts != sorted(counts) or (counts and counts[0] < 0):
        raise ValueError("the histogram has begun anew")
    if not counts or not counts[-1]:
        return None
    rank = math.ceil(counts[-1] * percentile / 100 - 1e-9)
    low, below = 0.0, 0.0
    for (bound, _), count in zip(now, counts, strict=True):
        high = low * 2 if math.isinf(bound) else bound
        if count > below and rank <= count:
            return high - (count - rank) * (high - low) / (count - below)
        low, below = high, count
    raise AssertionError("the last bucket has all")
