"""What a pod's own counters say about predicted hits, long before its answers do, or where these say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Metrics

Figures = tuple[float, float | None, int | None, int]

ENOUGH_TOKENS = 4096
"""Predicted hits that are judged together, at least."""

ENOUGH_LEGS = 4

MOST_LEGS = 1000
"""That a window remembers of a pod whose counters cannot be used."""


def figures(attempt: Attempt) -> Figures:
    """What is needed of a leg whose first byte has come, and for which hits, or none, were predicted."""
    prompt = attempt.request.prompt
    return (attempt.started_at, attempt.first_byte_at, attempt.predicted_cached_tokens, prompt.tokens)


class HitWindow:
    """Hits that were predicted beside those that the pod has counted since `opened`.

    Between two scrapes stand the hits of other requests too: of those that began before the first, and of other
    clients. They make the count larger, never smaller. So it can prove that predicted hits were missed, not that they
    came.
    `ended` takes the figures of each leg that has ended.
    """

    __slots__ = ("ended", "opened")

    def __init__(self, metrics: Metrics) -> None:
        self.open(metrics)

    def open(self, metrics: Metrics) -> None:
        self.opened = metrics
        self.ended: list[Any] = []

    def found(self, metrics: Metrics, running: Sequence[Any]) -> float | None:
        """Share of the predicted hits that came, at most; None while it cannot be told. `running` are the figures of
        legs that have not ended. The window must be opened anew after it was told."""
        legs, opened = [*self.ended, *running], self.opened
        if len(legs) < ENOUGH_LEGS:
            return None
        since, until = opened.scraped_at, metrics.scraped_at
        told = predicted = asked = 0
        for began, answered, prediction, prompt in legs:
            if began >= since and answered <= until:  # Whatever the pod counted for it lies between the two scrapes.
                told += 1
                predicted += prediction
                asked += prompt
        if predicted < ENOUGH_TOKENS or told < ENOUGH_LEGS:
            return None
        if metrics.prefix_queries - opened.prefix_queries < asked / 2:
            return None  # It counts something else, or nothing at all.
        return (metrics.prefix_hits - opened.prefix_hits) / predicted
