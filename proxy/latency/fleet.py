"""What is known of all pods together: what to expect of one that nothing is known of, and how good predictions are."""

from __future__ import annotations

from collections.abc import Callable

from proxy.latency.regression import Features, Regression

MEMORY = 0.998
FIRST_PREFILL = (0.0, 0.1, 0.0)
"""Before the first observation: 100 us per token."""

BESIDE_SHRINK = (0.0, 0.01, 0.0)
"""Prompts of one length do not say what tokens cost."""

SHRINK = (0.1, 0.0, 0.01)
"""What tokens can explain is not put down to the request, nor to its length."""

FIRST_DECODE = (0.01, 0.002, 0.0)
"""10 ms per token, and a fifth of a millisecond more per running request."""

FIRST_BESIDE = (0.0, 0.1, 1.0)
"""Of pods that compute prompts side by side: 100 us per token, and the wait as it is reckoned."""

FIRST_AMONG = (0.0, 0.1, 0.1)
"""Of pods that divide themselves among prompts: 100 us per token, its own or another's."""

FIRST_SHARE, SHARE_MEMORY = 0.2, 0.99
"""That prompts are computed in turn counts as much as lessons that add up to this; see OF_ALL."""

FIRST_TRUST = 0.1
SOLVE_EVERY = 4
FIRST_OUTPUT = 200.0
FIRST_PROMPT = 1000.0
SIZE_MEMORY = 0.98
ERROR_MEMORY = 0.98
SPEED_MEMORY = 0.98
FIRST_SPEED = (0.001, 0.001)
"""Seconds that prompts took, and that they should have taken."""

NEWS = 0.05
"""A change of speed by this share is news to pods that know nothing of their own."""

LEAST_JUDGED = 20
TOLERATED = 0.01
"""Seconds by which a prediction may be off without being wrong: an engine's step, and chance on the way there and
back."""


def _unheard() -> None:
    pass


class FleetModel:
    """Lives as long as the process; pods begin with its coefficients, and are drawn to them while they know little.

    `news` is called when pods that know nothing of their own have something to learn from it.
    """

    def __init__(self, news: Callable[[], None] = _unheard) -> None:
        self.news = news
        self.prefill = Regression(FIRST_PREFILL, MEMORY, FIRST_TRUST, SHRINK, SOLVE_EVERY)
        self.decode = Regression(FIRST_DECODE, MEMORY, FIRST_TRUST, every=SOLVE_EVERY)
        self.beside = Regression(FIRST_BESIDE, MEMORY, FIRST_TRUST, BESIDE_SHRINK, SOLVE_EVERY)
        self.among = Regression(FIRST_AMONG, MEMORY, FIRST_TRUST, BESIDE_SHRINK, SOLVE_EVERY)
        self.off = 0.0, 0.0
        """Squared relative errors of what these two foretell of all pods, of late."""
        self.share = 1.0
        """Of the pods together: see `Beside`."""
        self._of = self._alike = FIRST_SHARE
        self.output = FIRST_OUTPUT
        """Tokens of an answer, on average."""
        self.prompt = FIRST_PROMPT
        """Uncached tokens of a prompt, on average."""
        self._squares = FIRST_PROMPT * FIRST_PROMPT
        self.speed = 1.0
        """How much longer than the coefficients say prompts have taken of late, on average over the pods."""
        self.judged = 0
        self.lessons = 0
        """Of all pods; more of them mean that some pod shows how fast it is."""
        self._took, self._expected = FIRST_SPEED
        self._told = 1.0
        self._off = 0.0
        self._seen = 0.0

    @property
    def error(self) -> float:
        """Mean of |predicted - seen|, of which 10 ms are tolerated, over the mean of what was seen, of recent times to
        first token; 0 while fewer than 20 are known."""
        return self._off / self._seen if self.judged >= LEAST_JUDGED and self._seen > 0.0 else 0.0

    def judge(self, predicted: float, seen: float) -> None:
        self.judged += 1
        self._off = ERROR_MEMORY * self._off + max(0.0, abs(predicted - seen) - TOLERATED)
        self._seen = ERROR_MEMORY * self._seen + seen

    def observe_prefill(self, features: Features, seconds: float, allowance: float) -> None:
        self.prefill.observe(features, seconds, allowance)
        self.news()

    def observe_decode(self, features: Features, seconds: float, allowance: float) -> None:
        self.decode.observe(features, seconds, allowance)
        self.news()

    def share_of(self, of: float, alike: float) -> None:
        self.lessons += 1
        self._of = SHARE_MEMORY * self._of + of
        self._alike = SHARE_MEMORY * self._alike + alike
        self.share = min(1.0, max(0.0, self._of / self._alike))

    def off_by(self, beside: float, among: float) -> None:
        self.off = SHARE_MEMORY * self.off[0] + beside, SHARE_MEMORY * self.off[1] + among

    def hurry(self, expected: float, seconds: float) -> None:
        self.lessons += 1
        self._took = SPEED_MEMORY * self._took + seconds
        self._expected = SPEED_MEMORY * self._expected + expected
        self.speed = speed = self._took / self._expected
        if abs(speed - self._told) > NEWS * self._told:
            self._told = speed
            self.news()

    @property
    def prompt_of_token(self) -> float:
        """Uncached tokens of the prompt that one of them belongs to, on average: long prompts have more."""
        return self._squares / max(1.0, self.prompt)

    def answered(self, prompt: float, tokens: float) -> None:
        """The sizes of a typical request: uncached tokens of its prompt, tokens of its answer."""
        self.prompt = SIZE_MEMORY * self.prompt + (1.0 - SIZE_MEMORY) * prompt
        self._squares = SIZE_MEMORY * self._squares + (1.0 - SIZE_MEMORY) * prompt * prompt
        self.output = SIZE_MEMORY * self.output + (1.0 - SIZE_MEMORY) * tokens
