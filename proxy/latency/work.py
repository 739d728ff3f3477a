"""What a pod was given to do: prompts, and those of them that were answered together."""

from __future__ import annotations

from proxy.core.exchange import Exchange
from proxy.latency.regression import Features

TOKEN_SCALE, PAIR_SCALE = 1e-3, 1e-7
"""A thousand tokens, ten million pairs: what features of a prefill are counted in."""


class Group:
    """Prompts whose first tokens came out of one engine step: `seconds` of the pod's time went into all of them.

    `steps` are those that pass in engine steps whatever the prompts' lengths; `is_exact` is False if it is not known
    when the pod began with them.
    """

    __slots__ = ("at", "is_exact", "pairs", "start", "steps", "tokens")

    def __init__(self, start: float, at: float, steps: float, *, is_exact: bool) -> None:
        self.start = start
        self.at = at
        self.steps = steps
        self.is_exact = is_exact
        self.tokens = 0.0
        self.pairs = 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, self.at - self.start)

    @property
    def features(self) -> Features:
        return (1.0, self.tokens * TOKEN_SCALE, self.pairs * PAIR_SCALE)


class Leg:
    """One request on one pod. `tokens` are those of the prompt that are not cached, as far as is known, `pairs` what
    they attend to; `expected` is the predicted time to first token, in seconds."""

    __slots__ = ("decoding_from", "exchange", "expected", "pairs", "prefilled", "running", "tokens")

    def __init__(self, exchange: Exchange, tokens: float, prompt: float, expected: float) -> None:
        self.exchange = exchange
        self.tokens = tokens
        self.pairs = pairs(tokens, prompt)
        self.expected = expected
        self.decoding_from: float | None = None
        """When its first token came; None where that was not seen."""
        self.running = 0.0
        """What the pod's count of running requests, summed over time, was then."""
        self.prefilled = 0.0
        """The same of its seconds of prefill."""


def pairs(tokens: float, prompt: float) -> float:
    """Attention of the last `tokens` of a prompt: each with all before it."""
    return tokens * (prompt - 0.5 * tokens)
