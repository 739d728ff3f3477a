"""Legs that are stages of requests which several pods serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from proxy.core.attempt import Stage
from proxy.latency.work import Leg


class StagedLegs:
    """Those of one pod, until it is noticed that they have ended."""

    __slots__ = ("_legs",)

    def __init__(self) -> None:
        self._legs: list[Leg] = []

    def add(self, leg: Leg) -> None:
        self._legs = [*self._open(), leg]

    def coming(self) -> Iterator[Leg]:
        """Whose prompts other pods compute."""
        return (leg for leg in self._open() if leg.stage is Stage.DECODE)

    def kept(self) -> int:
        """How many get no tokens here: the prompt is computed, and yet to be fetched."""
        return sum(leg.stage is not Stage.DECODE and not leg.waits for leg in self._open())

    def _open(self) -> list[Leg]:
        self._legs = [leg for leg in self._legs if leg.attempt.ending is None]
        return self._legs


def pace_of(leg: Leg, tokens: int, now: float, running: float, prefilled: float) -> tuple[float, float] | None:
    """Of a streamed answer to what another pod computed: how many ran beside it on average, and its seconds per token.
    What ran, and what prompts held up, is known for all of the leg, and taken to be spread evenly. `running` and
    `prefilled` are the pod's sums, as the leg has them of its beginning."""
    attempt = leg.attempt
    first, whole = attempt.first_byte_at, now - attempt.started_at
    if first is None or tokens < 2 or not attempt.request.stream or now <= first:
        return None
    seconds = (attempt.last_byte_at or now) - first
    held_up = (prefilled - leg.prefilled) * seconds / whole
    return (running - leg.running) / whole, max(0.0, seconds - held_up) / (tokens - 1)


def waiting(legs: Iterable[Leg], at: float) -> int:
    """How many of them waited for their first token at that time."""
    begun = (leg.attempt for leg in legs if leg.attempt.started_at <= at)
    return sum(attempt.first_byte_at is None or attempt.first_byte_at > at for attempt in begun)
