"""How long who comes to a pod that divides itself among prompts waits for those that are there.

Each gets as much of the pod as any other, so that short prompts overtake long ones (processor sharing). A prompt of n
tokens then takes what these take, and for each of the others what n tokens take, or all of it where that is less.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.latency.work import Leg


def ahead(legs: Sequence[Leg], usual: float) -> tuple[float, float]:
    """(tokens of the `legs` that are computed before a prompt is, and for each token that it has): for prompts of the
    `usual` length as it is, for others by the tangent there, which is never less."""
    tokens = [leg.tokens for leg in legs if leg.tokens <= usual]
    return sum(tokens), len(legs) - len(tokens)
