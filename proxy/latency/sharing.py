"""Pods that share themselves among prompts (processor sharing) instead of computing them in turn.

Each prompt in line gets an equal part of such a pod, so short prompts overtake long ones. A prompt of n uncached tokens
takes load * (fixed + n * per_token) seconds, where load is how much slower responses are with what runs there than
alone, and `per_ahead` * load for each token that is computed before it: all tokens of a prompt in line that is not
longer, and n of a longer one. Where as many requests run as the pod runs at a time, a prompt also waits until enough of
them have ended. vLLM computes prompts in turn; the simulator of llm-d and AIPerf's mock server do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from proxy.core.endpoint import Freshness, LoadView, Metrics
from proxy.latency.rates import (
    MEMORY,
    MOST_SURPRISE,
    SHARING_SHRINK,
    SOLVE_EVERY,
    TOKEN_SCALE,
    TRUST,
    FleetModel,
    Rates,
)
from proxy.latency.regression import Features, Regression

ALLOWANCE = 0.01
"""Error in seconds that even the shortest time to first token may have."""

MOST_LOAD = 3.0

TELLING, DULL = 0.1, 0.002
"""Only a lesson on which the two models differ by this share of their sum tells which one is right. Any other counts
this much for prompts in turn, which is cheaper to compute."""


class Forms(NamedTuple):
    """Seconds to a first token as both models predict them, with so many prompts before it; and what the second
    prediction consists of: the wait for a slot, and the features of the rest."""

    queue: int
    in_turn: float
    shared: float
    wait: float
    features: Features


class Sharing:
    """The model of one pod. Lives as long as the pod's memory; `FleetModel.in_turn` says how much of it applies."""

    def __init__(self, fleet: FleetModel, rates: Rates) -> None:
        self._fleet = fleet
        self._rates = rates
        self._terms = Regression(fleet.sharing, MEMORY, TRUST, SHARING_SHRINK, SOLVE_EVERY)
        self._slots = inf
        """Requests that the pod runs at a time."""
        self._most = 0
        """Requests that were ever seen to run."""
        self.refresh(0)

    def read_scrape(self, scrape: Metrics) -> None:
        """Learn the number of slots: it is reached when requests wait while as many run as ever. Where fewer run,
        requests wait for something else, such as memory."""
        if scrape.freshness is Freshness.STALE:  # the pod may have been restarted with other settings
            self._slots, self._most = inf, 0
            return
        self._most = most = max(self._most, scrape.running)
        if self._slots < most or (scrape.waiting and scrape.running == most > 0):
            self._slots = most

    def refresh(self, running: int) -> None:
        """Read the coefficients again, for this number of requests that run or wait there."""
        rates = self._rates
        fixed, per_token, per_ahead = self._terms.coefficients
        pace = rates.step + rates.per_running * min(1 + running, self._slots)
        self.load = load = min(MOST_LOAD, pace / rates.alone)
        self.fixed = load * fixed
        self.per_token = load * per_token * TOKEN_SCALE
        self.per_ahead = load * per_ahead * TOKEN_SCALE
        self._response = self._fleet.output * pace

    def wait(self, view: LoadView) -> float:
        """Return the seconds until one more request has a slot: during one request all slots become free once."""
        queued, running, _ = view
        beyond = queued + running + 1 - self._slots
        if beyond <= 0.0:
            return 0.0
        return beyond * (self.fixed + self._fleet.prompt * self.per_token + self._response) / self._slots

    def ahead(self, queue: Iterable[float], others: float) -> tuple[float, float]:
        """Return the tokens that are computed before a prompt: some, and some for each token of the prompt.

        `queue` are the uncached tokens of the prompts in line, `others` tokens of prompts that this proxy did not send.
        The result is exact for a prompt of the usual length. For others it is the tangent there, which is never less.
        """
        usual, shorter, longer = self._fleet.prompt, others, 0
        for tokens in queue:
            if tokens <= usual:
                shorter += tokens
            else:
                longer += 1
        return shorter, longer

    def predict(self, in_turn: float, tokens: float, queue: Sequence[float], others: float, view: LoadView) -> Forms:
        """Predict the time to first token of a prompt, beside what the model of prompts in turn predicts."""
        (shorter, longer), load = self.ahead(queue, others), self.load
        scale = load * TOKEN_SCALE
        features = (load, scale * tokens, scale * (shorter + longer * tokens))
        wait = self.wait(view)
        return Forms(len(queue), in_turn, wait + self._terms.predict(features), wait, features)

    def observe(self, forms: Forms, seconds: float) -> None:
        """Learn which model was closer to the observed time, and the coefficients of this one."""
        self._rates.fading.is_news = True
        queue, in_turn, shared, wait, features = forms
        difference, unit = in_turn - shared, in_turn + shared + ALLOWANCE
        if abs(difference) > TELLING * unit:
            seen = min(seconds, MOST_SURPRISE * max(in_turn, shared))
            scale = difference / (unit * unit)
            self._fleet.learn_form((seen - shared) * scale, difference * scale)
            self._fleet.learn_reach(queue, abs(seen - shared) < abs(seen - in_turn))
        else:
            self._fleet.learn_form(DULL, DULL)
        self._terms.observe(features, max(0.0, seconds - wait), ALLOWANCE)
