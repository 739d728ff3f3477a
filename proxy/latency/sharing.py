"""Pods that share themselves among prompts (processor sharing) instead of computing them in turn.

Each queued prompt gets an equal part of such a pod, so short prompts overtake long ones. A prompt of n uncached tokens
takes load * (fixed + n * per_token) seconds, where load is the factor by which the running requests slow a response
down. Each token that is computed before the prompt adds `per_ahead` * load: all tokens of a queued prompt that is not
longer, and n tokens of a longer one. If the pod runs its maximum number of requests, a prompt also waits until enough
of them have ended. vLLM computes prompts in turn; the simulator of llm-d and AIPerf's mock server share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from proxy.core.endpoint import Freshness, LoadView, Metrics
from proxy.latency.rates import (
    MEMORY,
    MOST_DEVIATION,
    PRIOR_WEIGHT,
    SHARING_SHRINK,
    SOLVE_EVERY,
    TOKEN_SCALE,
    FleetModel,
    Rates,
)
from proxy.latency.regression import Features, Regression

ALLOWANCE = 0.01
"""Error of the shortest time to first token, in seconds."""

MOST_LOAD = 3.0

DECISIVE, INDECISIVE_WEIGHT = 0.1, 0.002
"""An observation shows which model is right only if the two predictions differ by this share of their sum. Any other
observation counts with this weight for prompts in turn, which is cheaper to compute."""


CERTAIN = 5
"""Scrapes of a full pod from which the number of its slots is certain."""


class Predictions(NamedTuple):
    """The predictions of both models for the time to first token, in seconds, with `queue` prompts before it; and the
    parts of the second one: the wait for a slot, and the features of the remaining time."""

    queue: int
    in_turn: float
    shared: float
    wait: float
    features: Features


class Sharing:
    """The model of one pod that shares itself. Lives as long as the pod's memory. `FleetModel.in_turn` is the weight of
    the other model."""

    def __init__(self, fleet: FleetModel, rates: Rates) -> None:
        self._fleet = fleet
        self._rates = rates
        self._terms = Regression(fleet.sharing, MEMORY, PRIOR_WEIGHT, SHARING_SHRINK, SOLVE_EVERY)
        self._slots = inf
        """Maximum number of requests that the pod runs at a time, by the first sign of it."""
        self.slots = inf
        """The same, but only once it is certain."""
        self._most = 0
        """Largest number of running requests that was observed."""
        self._full = 0
        """Successive scrapes with waiting requests in which so many ran, each after a response had ended."""
        self.refresh(0)

    def read_scrape(self, scrape: Metrics, has_ended: bool) -> None:
        """Learn the number of slots: the largest number of running requests, if requests wait while so many run. If
        fewer run, requests wait for something else, such as memory or longer prompts. It is certain once so many run
        in scrape after scrape although responses end, which `has_ended` says of the time since the last scrape."""
        if scrape.freshness is Freshness.STALE:  # the pod may have been restarted with other settings
            self._slots, self.slots, self._most, self._full = inf, inf, 0, 0
            return
        most = max(self._most, scrape.running)
        if most > self._most:
            self._most, self._full, self.slots = most, 0, inf
        is_full = scrape.waiting > 0 and scrape.running == most > 0
        if self._slots < most or is_full:
            self._slots = most
        if is_full:
            self._full += has_ended
            if self._full >= CERTAIN:
                self.slots = most
        elif scrape.waiting:
            self._full = 0

    def refresh(self, running: int) -> None:
        """Read the coefficients again, for this number of running and waiting requests."""
        rates = self._rates
        fixed, per_token, per_ahead = self._terms.coefficients
        pace = rates.step + rates.per_running * min(1 + running, self._slots)
        self.load = load = min(MOST_LOAD, pace / rates.alone)
        self.fixed = load * fixed
        self.per_token = load * per_token * TOKEN_SCALE
        self.per_ahead = load * per_ahead * TOKEN_SCALE
        self._response = self._fleet.output * pace

    def wait(self, view: LoadView) -> float:
        """Return the seconds until one more request has a slot. Each slot becomes free once per duration of a
        request."""
        queued, running, _ = view
        beyond = queued + running + 1 - self._slots
        if beyond <= 0.0:
            return 0.0
        return beyond * (self.fixed + self._fleet.prompt * self.per_token + self._response) / self._slots

    def ahead(self, queue: Iterable[float], others: float) -> tuple[float, float]:
        """Return the tokens that are computed before a prompt: a fixed number, and a number per token of the prompt.

        `queue` are the uncached tokens of the queued prompts, `others` the tokens of prompts that this proxy did not
        send. The result is exact for a prompt of the usual length, and an upper bound for other lengths.
        """
        usual, shorter, longer = self._fleet.prompt, others, 0
        for tokens in queue:
            if tokens <= usual:
                shorter += tokens
            else:
                longer += 1
        return shorter, longer

    def predict(
        self, in_turn: float, tokens: float, queue: Sequence[float], others: float, view: LoadView
    ) -> Predictions:
        """Predict the time to first token. `in_turn` is the prediction of the other model."""
        (shorter, longer), load = self.ahead(queue, others), self.load
        scale = load * TOKEN_SCALE
        features = (load, scale * tokens, scale * (shorter + longer * tokens))
        wait = self.wait(view)
        return Predictions(len(queue), in_turn, wait + self._terms.predict(features), wait, features)

    def observe(self, predictions: Predictions, seconds: float) -> None:
        """Learn from an observed time to first token which model was closer, and the coefficients of this one."""
        self._rates.fading.has_new_observation = True
        queue, in_turn, shared, wait, features = predictions
        difference, unit = in_turn - shared, in_turn + shared + ALLOWANCE
        if abs(difference) > DECISIVE * unit:
            seen = min(seconds, MOST_DEVIATION * max(in_turn, shared))
            scale = difference / (unit * unit)
            self._fleet.observe_discipline((seen - shared) * scale, difference * scale)
            self._fleet.observe_reach(queue, abs(seen - shared) < abs(seen - in_turn))
        else:
            self._fleet.observe_discipline(INDECISIVE_WEIGHT, INDECISIVE_WEIGHT)
        self._terms.observe(features, max(0.0, seconds - wait), ALLOWANCE)
