"""Learnt speeds: what prompts and response tokens take on one pod (`Rates`) and on the pods together (`FleetModel`)."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from proxy.latency.regression import Regression

TOKEN_SCALE, PAIR_SCALE = 1e-3, 5e-8
"""Features of a prefill are counted in thousands of tokens and in units of twenty million token pairs."""

RUNNING_SCALE, HELD_SCALE = 0.1, 1e-5

MEMORY = 0.98
"""Share of the past that one pod keeps with each observation."""

TRUST = 10.0
"""The fleet's coefficients count as much as this many observations of a pod's own."""

SOLVE_EVERY = 8
"""Observations of a pod between two solutions; the fleet learns from one observation of these."""

PREFILL_ALLOWANCE, DECODE_ALLOWANCE = 0.05, 0.002
"""Error in seconds that even the shortest prefill, and a token, may have."""

SLOWNESS_MEMORY = 0.8
MOST_SURPRISE = 3.0
"""A single observation changes the slowness as if it was off by this factor at most."""

SLOWNESS_SECONDS, TERMS_SECONDS = 5.0, 60.0
"""Time constants with which the slowness, and the coefficients, fade while a pod is not used; see `SilentPod`."""

MOST_SLOWNESS, LEAST_SLOWNESS = 10.0, 0.1
PRIOR_SECONDS = 0.01
"""Seconds of prefill on a pod that are taken to have had the fleet's slowness."""

LEAST_STEP = 0.001

FLEET_MEMORY = 0.998
FLEET_SOLVE_EVERY = 4
FIRST_TRUST = 0.1

FIRST_PREFILL = (0.0, 0.1, 0.0)
"""Before the first observation: 100 us per token."""

FIRST_DECODE = (0.01, 0.002, 0.0)
"""10 ms per token, and 0.2 ms more per running request."""

FIRST_SHARING = (0.0, 0.1, 0.1)
"""Of a pod that shares itself among prompts: 100 us per token, of the prompt and of the prompts beside it."""

SHRINK = (0.1, 0.0, 0.01)
"""The `shrink` of a prefill: between tokens, the fixed time and the pairs, tokens get the weight."""

SHARING_SHRINK = (0.0, 0.01, 0.0)
"""The `shrink` of `sharing`: prompts of a single length do not show the cost of a token."""

FIRST_FORM, FORM_MEMORY = 0.2, 0.99
"""At first the fleet is taken to compute prompts in turn, as if lessons of this weight had shown it; and the share of
the past that it keeps with each lesson. See `FleetModel.learn_form`."""

LEAST_IN_TURN, MOST_IN_TURN = 0.15, 0.7
"""Smaller shares count as 0 and larger ones as 1: chance makes pods that compute in turn look a little different."""

FIRST_REACH, FURTHER = 4.0, 2.0
"""`FleetModel.in_turn` applies to queues up to this length, and up to this many times the longest queue whose prompts
were computed side by side; see `FleetModel.in_turn_of`. Without a limit one of 256 pods that looked as if its queue
cost nothing got 160 times the mean."""

FIRST_OUTPUT, FIRST_PROMPT, SIZE_MEMORY = 200.0, 1000.0, 0.98
ERROR_MEMORY = 0.98
FLEET_SLOWNESS_MEMORY = 0.98
FIRST_SLOWNESS = (0.001, 0.001)
"""Observed and expected seconds of prompts."""

NEWS = 0.05
"""Pods without observations of their own are updated when the fleet's slowness has changed by this share."""

LEAST_JUDGED = 20
TOLERATED = 0.01
"""Prediction errors up to this many seconds count as none: an engine step, and chance on the network."""

QUIET_SECONDS = 5.0
"""What a pod has shown starts to fade after this time."""

FADE_INTERVAL = 1.0
"""Fading is applied at this interval, because it takes 0.1 ms."""


class FleetModel:
    """The model of all pods together. Lives as long as the process; a pod starts with its coefficients, and stays close
    to them while little is known of the pod. `news` is called when pods without own observations should read it again.
    """

    def __init__(self, news: Callable[[], object] = lambda: None) -> None:
        self.news = news
        self.prefill = Regression(FIRST_PREFILL, FLEET_MEMORY, FIRST_TRUST, SHRINK, FLEET_SOLVE_EVERY)
        self.decode = Regression(FIRST_DECODE, FLEET_MEMORY, FIRST_TRUST, every=FLEET_SOLVE_EVERY)
        self.sharing = Regression(FIRST_SHARING, FLEET_MEMORY, FIRST_TRUST, SHARING_SHRINK, FLEET_SOLVE_EVERY)
        self.in_turn = 1.0
        """Share of the truth in the model that prompts are computed in turn, from 0 to 1; the rest is `Sharing`."""
        self._in_turn_seen = self._in_turn_weight = FIRST_FORM
        self._reach = FIRST_REACH
        self.output = FIRST_OUTPUT
        """Mean tokens of a response."""
        self.prompt = FIRST_PROMPT
        """Mean uncached tokens of a prompt."""
        self.slowness = 1.0
        """Mean of observed over expected seconds of recent prompts."""
        self.judged = 0
        """Predictions compared with observations."""
        self.lessons = 0
        """Observations of all pods; `SilentPod` reads whether any pod shows its speed."""
        self._took, self._expected = FIRST_SLOWNESS
        self._published_slowness = 1.0
        self._off = self._seen = 0.0

    @property
    def error(self) -> float:
        """Mean error of recent predictions of the time to first token, beyond 10 ms, over the mean observed time; 0
        while fewer than 20 are known."""
        return self._off / self._seen if self.judged >= LEAST_JUDGED and self._seen > 0.0 else 0.0

    def judge(self, predicted: float, seen: float) -> None:
        self.judged += 1
        self._off = ERROR_MEMORY * self._off + max(0.0, abs(predicted - seen) - TOLERATED)
        self._seen = ERROR_MEMORY * self._seen + seen

    def observe_slowness(self, expected: float, seconds: float) -> None:
        self.lessons += 1
        self._took = FLEET_SLOWNESS_MEMORY * self._took + seconds
        self._expected = FLEET_SLOWNESS_MEMORY * self._expected + expected
        self.slowness = slowness = self._took / self._expected
        if abs(slowness - self._published_slowness) > NEWS * self._published_slowness:
            self._published_slowness = slowness
            self.news()

    def learn_form(self, in_turn: float, weight: float) -> None:
        """One lesson: `in_turn` / `weight` is how much of the truth was that prompts are computed in turn. The pods of
        a fleet run the same engine, so this is learnt for all of them together."""
        self.lessons += 1
        self._in_turn_seen = FORM_MEMORY * self._in_turn_seen + in_turn
        self._in_turn_weight = FORM_MEMORY * self._in_turn_weight + weight
        share = self._in_turn_seen / self._in_turn_weight
        self.in_turn = 0.0 if share < LEAST_IN_TURN else 1.0 if share > MOST_IN_TURN else share

    def learn_reach(self, queue: int, is_shared: bool) -> None:
        """Learn up to which queue length prompts are computed side by side. `is_shared`: this queue was."""
        reach = FURTHER * (queue + 1) if is_shared else FIRST_REACH
        self._reach = max(reach, FIRST_REACH, FORM_MEMORY * self._reach)

    def in_turn_of(self, queue: int) -> float:
        """Return `in_turn` for a queue of this length. A queue longer than any seen counts more as in turn."""
        return self.in_turn if queue <= self._reach else 1.0 - (1.0 - self.in_turn) * self._reach / queue

    def observe_sizes(self, prompt: float, output: float) -> None:
        """The uncached tokens of a prompt, and the tokens of its response."""
        self.prompt = SIZE_MEMORY * self.prompt + (1.0 - SIZE_MEMORY) * prompt
        self.output = SIZE_MEMORY * self.output + (1.0 - SIZE_MEMORY) * output


class SilentPod:
    """How long one pod has shown nothing while others did.

    A pod that looked slow once, after a cold start or a pause of its machine, is avoided while others are free, so it
    could never show that it is slow no longer. What it has shown therefore fades, and the pod is tried again: if it is
    still slow, one request shows that. While no pod is used, nothing fades.
    """

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self._lessons = fleet.lessons
        self._read_at: float | None = None
        self._age = self._missed = 0.0
        self.is_news = False
        """The pod has shown something since the last call of `seconds`."""

    def seconds(self, now: float) -> float:
        """Return the time by which observations of the pod have aged since the last call."""
        before, self._read_at = self._read_at, now
        lessons, self._lessons = self._lessons, self._fleet.lessons
        if self.is_news or before is None:
            self.is_news, self._age, self._missed = False, 0.0, 0.0
        elif lessons != self._lessons:
            self._age += now - before
            if self._age > QUIET_SECONDS:
                self._missed += now - before
        if self._missed < FADE_INTERVAL:
            return 0.0
        missed, self._missed = self._missed, 0.0
        return missed


class Rates:
    """The speeds of one pod. Lives as long as the pod's memory.

    A prefill takes fixed + slowness * step + tokens * per_token + pairs * per_pair seconds, and a response token
    step + running * per_running. The coefficients are learnt slowly; `slowness`, the recent observed over expected
    time, multiplies the coefficients of a prefill and follows a change at once.
    """

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self.prefill = Regression(fleet.prefill, MEMORY, TRUST, SHRINK, SOLVE_EVERY)
        self.decode = Regression(fleet.decode, MEMORY, TRUST, every=SOLVE_EVERY)
        self.fading = SilentPod(fleet)
        self._seen = self._expected = 0.0
        self._held = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Read the coefficients again. Call it when the fleet's have changed and nothing is known of the pod."""
        step, per_running, per_held = self.decode.coefficients
        self.step = max(LEAST_STEP, step + per_held * self._held)
        self.per_running = per_running * RUNNING_SCALE
        self.alone = max(LEAST_STEP, step) + self.per_running
        self._apply_slowness()

    def set_cached(self, tokens: float) -> None:
        """Set the tokens in the pod's KV cache: attention to them makes steps longer."""
        self._held = tokens * HELD_SCALE
        self.refresh()

    def fade(self, seconds: float) -> None:
        """Forget as much as in this time without observations; `refresh` follows."""
        left = exp(-seconds / SLOWNESS_SECONDS)
        self._seen *= left
        self._expected *= left
        left = exp(-seconds / TERMS_SECONDS)
        self.prefill.fade(left)
        self.decode.fade(left)

    def observe_prefill(self, seconds: float, steps: float, tokens: float, pairs: float) -> None:
        """Learn from prompts whose first tokens came out of one engine step. The pod worked on all of them for
        `seconds`, and `steps` of these pass in engine steps whatever the lengths of the prompts."""
        features = (1.0, tokens * TOKEN_SCALE, pairs * PAIR_SCALE)
        self.observe_slowness(steps + self.prefill.predict(features), seconds)
        if self.prefill.observe(features, max(0.0, seconds - steps), PREFILL_ALLOWANCE):
            self._fleet.news()
            self.refresh()

    def observe_decode(self, running: float, pace: float) -> None:
        """Learn from a response: its seconds per token, and the mean number of requests that ran beside it."""
        self.fading.is_news = True
        features = (1.0, running * RUNNING_SCALE, self._held)
        if self.decode.observe(features, pace, DECODE_ALLOWANCE):
            self._fleet.news()
            self.refresh()

    def observe_slowness(self, expected: float, seconds: float) -> None:
        """Compare what the coefficients predict with what was observed."""
        self.fading.is_news = True
        usual = self.slowness * expected
        within = min(MOST_SURPRISE * usual, max(usual / MOST_SURPRISE, seconds))
        self._seen = SLOWNESS_MEMORY * self._seen + within
        self._expected = SLOWNESS_MEMORY * self._expected + expected
        self._fleet.observe_slowness(expected, within)
        self._apply_slowness()

    def _apply_slowness(self) -> None:
        seen, expected = self._seen + PRIOR_SECONDS * self._fleet.slowness, self._expected + PRIOR_SECONDS
        self.slowness = slowness = min(MOST_SLOWNESS, max(LEAST_SLOWNESS, seen / expected))
        fixed, per_token, per_pair = self.prefill.coefficients
        self.fixed = slowness * fixed
        self.per_token = slowness * per_token * TOKEN_SCALE
        self.per_pair = slowness * per_pair * PAIR_SCALE
