"""What each tenant has had of late: tokens, which count less the longer ago they were."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2, inf

from proxy.core.attempt import Attempt
from proxy.flowcontrol.settings import LeastService

ANSWER_WEIGHT = 2.0
"""A token of an answer takes about as much of a pod as two of a prompt."""

MOST_TENANTS = 100_000
"""Clients may choose their names."""


class Attained:
    """Of all bands together, as long as there is a gate. Times are monotonic seconds."""

    def __init__(self, settings: LeastService) -> None:
        self.settings = settings
        self._had: dict[str, tuple[float, float]] = {}
        """Tokens, and when they were counted; whose were counted last comes last."""
        self._latest = -inf

    def add(self, tenant: str, tokens: float, now: float) -> None:
        self._latest = now
        had = self.had(tenant)
        self._had.pop(tenant, None)
        self._had[tenant] = (had + tokens, now)
        self._forget(now - (self.settings.forget_after or inf))

    def had(self, tenant: str) -> float:
        """As it was when any tenant got something last: at any other time all had the same share of that."""
        tokens, at = self._had.get(tenant, (0.0, 0.0))
        half_life = self.settings.half_life
        return tokens * exp2((at - self._latest) / half_life) if tokens and half_life else tokens

    def _forget(self, before: float) -> None:
        while self._had:
            tenant, (_, at) = next(iter(self._had.items()))
            if at >= before and len(self._had) <= MOST_TENANTS:
                return
            del self._had[tenant]


def tokens_of(legs: Iterable[Attempt]) -> float:
    """Of a request, whoever asked for them: as the engine counted them, or else as they were estimated and seen."""
    return sum(map(_tokens, legs))


def _tokens(leg: Attempt) -> float:
    if leg.status is None or leg.status >= 300:
        return 0.0
    if (usage := leg.usage) is not None:
        return usage.prompt_tokens + ANSWER_WEIGHT * usage.completion_tokens
    return leg.request.prompt.tokens + ANSWER_WEIGHT * leg.chunks
