"""What a pod was given to do: prompts, and those of them that were answered together."""

from __future__ import annotations

from typing import NamedTuple

from proxy.core.attempt import WHOLE, Attempt
from proxy.latency.regression import Features

TOKEN_SCALE, PAIR_SCALE = 1e-3, 5e-8
"""A thousand tokens, twenty million pairs: what features of a prefill are counted in."""


class Group:
    """Prompts whose first tokens came out of one engine step: the pod's time from `start` to `at` went into all of
    them. `steps` are those of its seconds that pass in engine steps whatever the prompts' lengths."""

    __slots__ = ("at", "pairs", "start", "steps", "tokens")

    def __init__(self, start: float, at: float, steps: float) -> None:
        self.start = start
        self.at = at
        self.steps = steps
        self.tokens = 0.0
        self.pairs = 0.0


class Told(NamedTuple):
    """Seconds to a first token as a form of a pod foretold them, and what from."""

    seconds: float
    features: Features


class Guess(NamedTuple):
    """Seconds to a first token as each form of a pod foretold them, with so many in line before it."""

    ahead: int
    in_turn: float
    beside: Told
    among: Told


class Leg:
    """One request on one pod. `tokens` are those of the prompt that are not cached, as far as is known, `pairs` what
    they attend to."""

    # All of it on the object: what is found on the class only takes 150 instructions more to read.
    __slots__ = (
        "answered_at",
        "attempt",
        "expected",
        "guess",
        "is_guess",
        "pairs",
        "prefilled",
        "running",
        "shows",
        "stage",
        "tokens",
        "waits",
    )

    def __init__(self, attempt: Attempt, tokens: float, prompt: float) -> None:
        self.attempt = attempt
        self.shows = attempt.request.stream
        """Its first byte comes when the prompt is computed, and not when all is done."""
        self.tokens = tokens
        self.pairs = tokens * (2.0 * prompt - tokens)
        """Attention of the last `tokens` of the prompt: each with all before it. Every pair counts twice."""
        self.stage = WHOLE
        """As it was begun."""
        self.waits = True
        """For its first token; in line."""
        self.expected: float | None = None
        """The predicted time to first token, in seconds; None for those that nothing is to be learnt from."""
        self.guess: Guess | None = None
        """Of those that something is to be learnt from."""
        self.is_guess = False
        """The prediction was made with too little knowledge to be judged."""
        self.answered_at: float | None = None
        """When its first token came; None where that was not seen."""
        self.running = self.prefilled = 0.0
        """What the pod's count of running requests, summed over time, was then; the same of its seconds of prefill."""
