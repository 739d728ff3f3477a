"""What is learnt from which request: from few of them, for more say little that is new and cost much."""

from __future__ import annotations

from collections import deque
from math import inf

from proxy.core.attempt import Stage
from proxy.latency.fleet import FleetModel
from proxy.latency.pace import PacedPod, Prices
from proxy.latency.staged import pace_of
from proxy.latency.work import Group, Leg

TOGETHER = 0.003
"""First tokens that come within so many seconds came out of the same step."""

RESIDUE = 0.5
"""Of a step that is under way when a request comes, this share is still to come."""

LEAST_OBSERVED = 8
"""Prompts. What is predicted after fewer is a guess, and is not judged."""

LESSON_SECONDS, FIRST_LESSONS = 0.33, 16
"""After the first lessons a pod gives one every so many seconds: to learn from a prompt and its answer takes 3,000
bytecodes more than to count them out."""

LEAST_LESSON_SECONDS = 0.05
"""Of a pod that computes prompts side by side, chance hides more."""


class TaughtPod(PacedPod):
    """Learns from prompts and answers; who is in line is told to it."""

    __slots__ = (
        "_followed",
        "_group",
        "_is_exact",
        "_lessons",
        "_next_group",
        "_next_leg",
        "_prefilled",
        "_since",
        "_step_at",
        "legs",
    )

    def __init__(self, fleet: FleetModel, prices: Prices, now: float) -> None:
        super().__init__(fleet, prices, now)
        self.legs: deque[Leg] = deque()
        """Those without a first token, as they were sent."""
        self._since = now
        """When the pod began with the first of them."""
        self._is_exact = True
        """It is known when that was."""
        self._group: Group | None = None
        """What is learnt from next."""
        self._step_at = -inf
        """When the step ended that gave the last first token."""
        self._followed = 0
        """Legs under way that something is to be learnt from."""
        self._prefilled = 0.0
        self._lessons = 0
        self._next_group = self._next_leg = now

    def _learn_prefill(self, leg: Leg, at: float) -> None:
        sent = leg.attempt.started_at
        if at > self._step_at + TOGETHER:
            self._step_at = at
            self._begin_group(sent, at)
        group = self._group
        if group is not None:
            group.tokens += leg.tokens
            group.pairs += leg.pairs
        if leg.expected is not None:
            if not leg.is_guess:
                self._fleet.judge(leg.expected, at - sent)
            if leg.guess is not None:
                self.beside.take(leg.guess, at - sent)
                self._has_learnt()
            self._count_running(at)
            leg.answered_at, leg.running, leg.prefilled = at, self._running_sum, self._prefilled

    def _begin_group(self, sent: float, at: float) -> None:
        """The one before it is complete."""
        if self._group is not None:
            self.rates.take(self._group)
            self._group = None
            self._has_learnt()
        since, steps = self._since, self.step
        if sent > since and self._running:
            steps += RESIDUE * steps
        start = max(since, sent)
        self._prefilled += self._share * max(0.0, at - start - steps)
        if at >= self._next_group and self._is_exact:
            self._next_group = self._after_lesson(at)
            self._group = Group(start, at, steps)

    def _after_lesson(self, now: float) -> float:
        """When the next is wanted."""
        self._lessons += 1
        if self._lessons <= FIRST_LESSONS:
            return now
        return now + max(LEAST_LESSON_SECONDS, self._share * LESSON_SECONDS)

    def _learn(self, leg: Leg, expected: float, now: float) -> None:
        """From a whole answer. One that was not streamed says only how long all of it took."""
        attempt, usage, rates = leg.attempt, leg.attempt.usage, self.rates
        tokens = usage.completion_tokens if usage is not None else attempt.chunks
        if leg.stage is not Stage.WHOLE:
            self._learn_stage(leg, tokens, now)
        elif leg.answered_at is not None:
            self._fleet.answered(leg.tokens, tokens)
            seconds = (attempt.last_byte_at or now) - leg.answered_at
            if tokens > 1 and seconds > 0.0:
                self._count_running(now)
                running = (self._running_sum - leg.running) / (now - leg.answered_at)
                rates.answer(running, max(0.0, seconds - self._prefilled + leg.prefilled) / (tokens - 1))
                self._has_learnt()
        elif usage is not None and not leg.shows:
            self._fleet.answered(leg.tokens, tokens)
            whole = expected / rates.speed + max(0, tokens - 1) * (self.step + rates.per_running)
            rates.hurry(whole, now - attempt.started_at)
            self._has_learnt()

    def _learn_stage(self, leg: Leg, tokens: int, now: float) -> None:
        """Of an answer to what another pod computed only its pace, of a prompt for another pod only its size."""
        fleet = self._fleet
        if leg.stage is not Stage.DECODE:
            fleet.answered(leg.tokens, fleet.output)
            return
        fleet.answered(fleet.prompt, tokens)
        self._count_running(now)
        seen = pace_of(leg, tokens, now, self._running_sum, self._prefilled)
        if seen is not None:
            self.rates.answer(*seen)
            self._has_learnt()
