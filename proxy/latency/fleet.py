"""What is known of all pods together: what to expect of one that nothing is known of, and how good predictions are."""

from __future__ import annotations

from proxy.latency.regression import Regression

MEMORY = 0.998
FIRST_PREFILL = (0.0, 0.1, 0.0)
"""Before the first observation: 100 us per token."""

SHRINK = (0.1, 0.0, 0.01)
"""What tokens can explain is not put down to the request, nor to its length."""

FIRST_DECODE = (0.01, 0.002, 0.0)
"""10 ms per token, and a fifth of a millisecond more per running request."""

FIRST_TRUST = 0.1
FIRST_OUTPUT = 200.0
FIRST_PROMPT = 1000.0
SIZE_MEMORY = 0.98
ERROR_MEMORY = 0.98
SPEED_MEMORY = 0.98
FIRST_SPEED = (0.001, 0.001)
"""Seconds that prompts took, and that they should have taken."""

LEAST_JUDGED = 20


class FleetModel:
    """Lives as long as the process; pods begin with its coefficients, and are drawn to them while they know little."""

    def __init__(self) -> None:
        self.prefill = Regression(FIRST_PREFILL, MEMORY, FIRST_TRUST, SHRINK)
        self.decode = Regression(FIRST_DECODE, MEMORY, FIRST_TRUST)
        self.output = FIRST_OUTPUT
        """Tokens of an answer, on average."""
        self.prompt = FIRST_PROMPT
        """Uncached tokens of a prompt, on average."""
        self.took, self.expected = FIRST_SPEED
        self.judged = 0
        self._off = 0.0
        self._seen = 0.0

    @property
    def error(self) -> float:
        """Mean of |predicted - seen| over the mean of what was seen, of recent times to first token; 0 while fewer than
        20 are known."""
        return self._off / self._seen if self.judged >= LEAST_JUDGED and self._seen > 0.0 else 0.0

    def judge(self, predicted: float, seen: float) -> None:
        self.judged += 1
        self._off = ERROR_MEMORY * self._off + abs(predicted - seen)
        self._seen = ERROR_MEMORY * self._seen + seen

    @property
    def speed(self) -> float:
        """How much longer than the coefficients say prompts have taken of late, on average over the pods."""
        return self.took / self.expected

    def hurry(self, expected: float, seconds: float) -> None:
        self.took = SPEED_MEMORY * self.took + seconds
        self.expected = SPEED_MEMORY * self.expected + expected

    def answered(self, tokens: int) -> None:
        self.output = SIZE_MEMORY * self.output + (1.0 - SIZE_MEMORY) * tokens

    def sent(self, uncached: float) -> None:
        self.prompt = SIZE_MEMORY * self.prompt + (1.0 - SIZE_MEMORY) * uncached
