"""The other form that a pod may have: it computes prompts side by side, and who finds no room waits for that of others.

A prompt takes load * (fixed + tokens * per_token) seconds, whatever else is computed, where load is how much slower the
answers are among those that run than one would be alone. Before it, whoever comes when all places or all blocks of the
KV cache are taken waits until as many have ended as they need: in the time that a request takes in all, all that is
taken has become free. The two coefficients are learnt, and by what the wait is to be multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import exp, inf

from proxy.core.endpoint import Freshness, LoadView, Metrics
from proxy.latency.fleet import BESIDE_SHRINK, FleetModel
from proxy.latency.rates import MEMORY, MOST_SURPRISE, SOLVE_EVERY, TRUST, Rates
from proxy.latency.regression import Regression
from proxy.latency.work import TOKEN_SCALE, Guess, Leg

ALLOWANCE = 0.01
"""Seconds by which even the soonest first token may be off."""

MOST_LOAD = 3.0

TELLING, DULL = 0.1, 0.002
"""Only a lesson on which the forms differ by this share of their sum says which one is right. Any other counts so much
for prompts in turn, which is cheaper to reckon."""

SHARE_MEMORY = 0.95
SHARE_SECONDS = 5.0
"""A pod that has shown nothing of its form for so long forgets what it has shown, in as long to a third. Else one that
was misjudged would be avoided, and so never show that it was."""

OF_ALL = 0.2
"""What the pods are like together counts as much as lessons of which the squared relative differences between the two
forms add up to this: one of which a form foretold twice what the other did adds 0.1."""

HARDLY, NEARLY = 0.15, 0.7
"""Shares below the one are 0, above the other 1: chance makes a pod that computes in turn look a bit otherwise."""


class Beside:
    """Of one pod. Lives as long as the pod's memory."""

    __slots__ = (
        "_alike",
        "_blocks",
        "_blocks_stay",
        "_faded_at",
        "_fleet",
        "_held",
        "_is_news",
        "_most",
        "_of",
        "_places",
        "_rates",
        "_running",
        "_shown_at",
        "fixed",
        "load",
        "per_token",
        "share",
        "stay",
        "terms",
        "waits",
    )

    def __init__(self, fleet: FleetModel, rates: Rates) -> None:
        self._fleet = fleet
        self._rates = rates
        self.terms = Regression(fleet.beside, MEMORY, TRUST, BESIDE_SHRINK, SOLVE_EVERY)
        self.share = 1.0
        """How much of the truth is that prompts are computed in turn, from 0 to 1: the form that was right of late, or
        a mixture that was better than both."""
        self._of = self._alike = 0.0
        self._is_news = False
        self._shown_at = self._faded_at = -inf
        self._places: float = inf
        """Those that can run, as far as it was seen."""
        self._most = 0
        """That were ever seen to run. Where fewer run and others wait, these wait for blocks: of a long prompt, which
        may be more than seem to be left."""
        self._blocks = self._held = 0.0
        """Tokens that the KV cache has room for, and those in it."""
        self._running = 0
        self.load = 1.0
        self.stay = 0.0
        """Seconds that a request takes in all, once it has a place."""
        self._blocks_stay = 0.0
        """The same of the request that a block is held by: most are by the long ones."""
        self.see(0)
        self.renew()

    def look(self, scrape: Metrics) -> None:
        """Those that wait do so for places, or for blocks; where nobody runs, for what comes from another pod."""
        self._fade(scrape.scraped_at)
        if scrape.freshness is Freshness.STALE:
            self._places, self._most, self._blocks = inf, 0, 0.0
            return
        self._blocks = scrape.blocks * scrape.block_size
        self._held = scrape.kv_usage * self._blocks
        self._running = running = scrape.running
        is_full = self._blocks and self._held + self._fleet.prompt > self._blocks
        if running > self._places or (scrape.waiting and running and running >= self._most and not is_full):
            self._places = running
        self._most = max(self._most, running)

    def see(self, running: int) -> None:
        """So many run or wait there; `rates` have changed."""
        rates, fleet = self._rates, self._fleet
        self.fixed, per_token, self.waits = self.terms.coefficients
        self.per_token = per_token * TOKEN_SCALE
        pace = rates.step + rates.per_running * (1 + min(running, self._places))
        self.load = load = min(MOST_LOAD, pace / rates.alone)
        work, answer = load * self.fixed, fleet.output * pace
        self.stay = work + load * self.per_token * fleet.prompt + answer
        self._blocks_stay = work + load * self.per_token * fleet.prompt_of_token + answer

    def wait(self, view: LoadView, legs: Sequence[Leg]) -> tuple[float, float]:
        """(seconds that the next request waits, and for each token more that it needs). The `legs` are those without a
        first token, the youngest last."""
        there = view.waiting + view.running
        place = there + 1 - self._places
        seconds = place * self.stay / self._places if place > 0 else 0.0
        if not self._blocks:
            return seconds, 0.0
        unseen = max(0, there - self._running)
        to_come = sum(leg.tokens for leg in islice(reversed(legs), unseen)) + self._fleet.prompt
        beyond = self._held + to_come - self._blocks
        if beyond <= 0.0:
            return seconds, 0.0
        per_token = self._blocks_stay / self._blocks
        return max(seconds, beyond * per_token), per_token

    def guess(self, in_turn: float, tokens: float, wait: tuple[float, float]) -> Guess:
        """Beside what the other form foretells."""
        load, (seconds, per_token) = self.load, wait
        features = (load, load * tokens * TOKEN_SCALE, seconds + tokens * per_token)
        return Guess(in_turn, self.terms.predict(features), features)

    def take(self, guess: Guess, seconds: float) -> None:
        """What came of it."""
        self._is_news = True
        in_turn, beside, features = guess
        apart, unit = in_turn - beside, in_turn + beside + ALLOWANCE
        of = alike = DULL
        if abs(apart) > TELLING * unit:
            seen = min(seconds, MOST_SURPRISE * max(in_turn, beside))
            of, alike = (seen - beside) * apart / (unit * unit), apart * apart / (unit * unit)
        self._of = SHARE_MEMORY * self._of + of
        self._alike = SHARE_MEMORY * self._alike + alike
        self._fleet.share_of(of, alike)
        self.renew()
        if self.terms.observe(features, seconds, ALLOWANCE):
            self._fleet.beside.observe(features, seconds, ALLOWANCE)

    def _fade(self, now: float) -> None:
        """What a pod has shown counts less and less, once it shows nothing new."""
        if self._is_news:
            self._is_news, self._shown_at = False, now
        elif now - self._shown_at > SHARE_SECONDS:
            left = exp((self._faded_at - now) / SHARE_SECONDS)
            self._of *= left
            self._alike *= left
            self.renew()
        self._faded_at = now

    def renew(self) -> None:
        """With what was seen of all pods."""
        share = (self._of + OF_ALL * self._fleet.share) / (self._alike + OF_ALL)
        self.share = 0.0 if share < HARDLY else 1.0 if share > NEARLY else share
