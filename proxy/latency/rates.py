"""Seconds that one pod takes for what: coefficients that are learnt slowly, and a speed that follows at once."""

from __future__ import annotations

from math import exp

from proxy.latency.fading import Fading
from proxy.latency.fleet import SHRINK, FleetModel
from proxy.latency.regression import Regression
from proxy.latency.work import PAIR_SCALE, TOKEN_SCALE, Group

MEMORY = 0.98
TRUST = 10.0
"""So many observations of a pod's own count as much as all of the others'."""

SOLVE_EVERY = 8
"""Observations; of so many the fleet's coefficients learn from one."""

PREFILL_ALLOWANCE = 0.05
DECODE_ALLOWANCE = 0.002
"""Seconds by which even the shortest prefill, and a token, may be off."""

RUNNING_SCALE, HELD_SCALE = 0.1, 1e-5
SPEED_MEMORY = 0.8
MOST_SURPRISE = 3.0
"""A single observation changes the speed as if it were off by this factor at most."""

SPEED_SECONDS, TERMS_SECONDS = 5.0, 60.0
"""In which the speed, and the coefficients, fade to a third; see `Fading`."""

SLOWEST, FASTEST = 10.0, 0.1
DOUBT = 0.01
"""So many seconds of prefill, on a pod, of which the speed is taken to be that of the others."""

LEAST_STEP = 0.001


class Rates:
    """A prefill takes fixed + speed * step + tokens * per_token + pairs * per_pair seconds, a token of an answer
    step + running * per_running. Lives as long as the pod's memory, and is like the fleet's while that is short."""

    __slots__ = (
        "_expected",
        "_fleet",
        "_held",
        "_seen",
        "alone",
        "decode",
        "fading",
        "fixed",
        "per_pair",
        "per_running",
        "per_token",
        "prefill",
        "speed",
        "step",
    )

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self.prefill = Regression(fleet.prefill, MEMORY, TRUST, SHRINK, SOLVE_EVERY)
        self.decode = Regression(fleet.decode, MEMORY, TRUST, every=SOLVE_EVERY)
        self.fading = Fading(fleet)
        self._seen = self._expected = 0.0
        self._held = 0.0
        self.renew()

    def renew(self) -> None:
        """To be called when the fleet's have changed, while nothing is known of the pod's own."""
        step, per_running, per_held = self.decode.coefficients
        self.step = max(LEAST_STEP, step + per_held * self._held)
        self.per_running = per_running * RUNNING_SCALE
        self.alone = max(LEAST_STEP, step) + self.per_running
        self._keep_pace()

    def hold(self, tokens: float) -> None:
        """So many tokens are in the pod's KV cache."""
        self._held = tokens * HELD_SCALE
        self.renew()

    def fade(self, seconds: float) -> None:
        """By as much as in so many seconds in which the pod showed nothing; `renew` follows."""
        left = exp(-seconds / SPEED_SECONDS)
        self._seen *= left
        self._expected *= left
        left = exp(-seconds / TERMS_SECONDS)
        self.prefill.fade(left)
        self.decode.fade(left)

    def take(self, group: Group) -> None:
        """Learn from prompts."""
        seconds = group.at - group.start
        features = (1.0, group.tokens * TOKEN_SCALE, group.pairs * PAIR_SCALE)
        self.hurry(group.steps + self.prefill.predict(features), seconds)
        prefill = max(0.0, seconds - group.steps)
        if self.prefill.observe(features, prefill, PREFILL_ALLOWANCE):
            self._fleet.observe_prefill(features, prefill, PREFILL_ALLOWANCE)
            self.renew()

    def answer(self, running: float, pace: float) -> None:
        """Learn from an answer: its seconds per token, and how many ran beside it on average."""
        self.fading.is_news = True
        features = (1.0, running * RUNNING_SCALE, self._held)
        if self.decode.observe(features, pace, DECODE_ALLOWANCE):
            self._fleet.observe_decode(features, pace, DECODE_ALLOWANCE)
            self.renew()

    def hurry(self, expected: float, seconds: float) -> None:
        """What was seen of late over what the coefficients say: it follows a change before they do."""
        self.fading.is_news = True
        usual = self.speed * expected
        within = min(MOST_SURPRISE * usual, max(usual / MOST_SURPRISE, seconds))
        self._seen = SPEED_MEMORY * self._seen + within
        self._expected = SPEED_MEMORY * self._expected + expected
        self._fleet.hurry(expected, within)
        self._keep_pace()

    def _keep_pace(self) -> None:
        seen, expected = self._seen + DOUBT * self._fleet.speed, self._expected + DOUBT
        self.speed = speed = min(SLOWEST, max(FASTEST, seen / expected))
        fixed, per_token, per_pair = self.prefill.coefficients
        self.fixed = speed * fixed
        self.per_token = speed * per_token * TOKEN_SCALE
        self.per_pair = speed * per_pair * PAIR_SCALE
