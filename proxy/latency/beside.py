"""The other forms that a pod may have: it computes prompts side by side, or divides itself among them.

A prompt takes load * (fixed + tokens * per_token) seconds, where load is how much slower the answers are among those
that run than one would be alone; and who comes waits, for room (see `Places`) or for his share of the pod (see
`ahead`). The two coefficients are learnt, and by what the wait is to be multiplied: for each of the two forms, of which
that is taken which was less wrong of late.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from proxy.core.endpoint import LoadView, Metrics
from proxy.latency.among import ahead
from proxy.latency.fleet import BESIDE_SHRINK, FleetModel
from proxy.latency.places import Places
from proxy.latency.rates import MEMORY, MOST_SURPRISE, SOLVE_EVERY, TRUST, Rates
from proxy.latency.regression import Regression
from proxy.latency.work import TOKEN_SCALE, Guess, Leg, Told

ALLOWANCE = 0.01
"""Seconds by which even the soonest first token may be off."""

MOST_LOAD = 3.0

TELLING, DULL = 0.1, 0.002
"""Only a lesson on which the forms differ by this share of their sum says which one is right. Any other counts so much
for prompts in turn, which is cheaper to reckon."""

SHARE_MEMORY = 0.95
SHARE_SECONDS = 5.0
"""In which what a pod has shown of its form fades to a third; see `Fading`."""

OF_ALL = 0.2
"""What the pods are like together counts as much as lessons of which the squared relative differences between the two
forms add up to this: one of which a form foretold twice what the other did adds 0.1."""

HARDLY, NEARLY = 0.15, 0.7
"""Shares below the one are 0, above the other 1: chance makes a pod that computes in turn look a bit otherwise."""

FIRST_SHOWN, FURTHER = 4.0, 2.0
"""Beyond so many in line, and so many times the longest line that it has shown not to be one, a pod is less and less
taken to be of these forms. Of hundreds of pods some look as if a line cost nothing, by chance and after a few lessons,
and whoever looks best gets all until it has shown that it is not: one of 256 got 160 times as much as the others."""

SHOWN_MEMORY = 0.95

DIVIDED = 0.5
"""Of the two forms the other is taken when its error is less than this share of that which was taken."""


class Beside:
    """Of one pod. Lives as long as the pod's memory."""

    __slots__ = (
        "_alike",
        "_among",
        "_fleet",
        "_of",
        "_off",
        "_places",
        "_rates",
        "_roomy",
        "_shown",
        "divides",
        "fixed",
        "load",
        "per_token",
        "share",
        "waits",
    )

    def __init__(self, fleet: FleetModel, rates: Rates) -> None:
        self._fleet = fleet
        self._rates = rates
        self._roomy = Regression(fleet.beside, MEMORY, TRUST, BESIDE_SHRINK, SOLVE_EVERY)
        self._among = Regression(fleet.among, MEMORY, TRUST, BESIDE_SHRINK, SOLVE_EVERY)
        self._places = Places(fleet)
        self.share = 1.0
        """How much of the truth is that prompts are computed in turn, from 0 to 1: the form that was right of late, or
        a mixture that was better than both."""
        self.divides = True
        """The other form is that of a pod that divides itself among prompts. It is the one to begin with: where it is
        wrong, pods get less than they could take; where that with room is, one pod gets all until it has shown it."""
        self._of = self._alike = 0.0
        self._shown = FIRST_SHOWN
        """In line, as far as lessons reach."""
        self._off = 0.0, 0.0
        """Squared relative errors of the two other forms, of late."""
        self.load = 1.0
        self.see(0)
        self.renew()

    def look(self, scrape: Metrics) -> None:
        self._places.look(scrape)

    def fade(self, seconds: float) -> None:
        """By as much as in so many seconds in which the pod showed nothing."""
        left = exp(-seconds / SHARE_SECONDS)
        self._of *= left
        self._alike *= left
        self._shown = max(FIRST_SHOWN, left * self._shown)
        self._off = left * self._off[0], left * self._off[1]
        self.renew()

    def see(self, running: int) -> None:
        """So many run or wait there; `rates` have changed."""
        rates = self._rates
        self.fixed, per_token, self.waits = (self._among if self.divides else self._roomy).coefficients
        self.per_token = per_token * TOKEN_SCALE
        pace = rates.step + rates.per_running * (1 + self._places.running(running))
        self.load = load = min(MOST_LOAD, pace / rates.alone)
        self._places.take(load * self.fixed, load * self.per_token, self._fleet.output * pace)

    def share_with(self, legs: int) -> float:
        """`share`, with so many in line."""
        return self.share if legs <= self._shown else 1.0 - (1.0 - self.share) * self._shown / legs

    def wait(self, view: LoadView, legs: Sequence[Leg], others: float) -> tuple[float, float]:
        """(what the next request waits, and for each token more that it has), of which each is `waits` seconds. The
        `legs` are those without a first token, the youngest last, `others` the tokens of prompts that are not ours."""
        return self._turns(legs, others) if self.divides else self._places.wait(view, legs)

    def guess(self, in_turn: float, tokens: float, view: LoadView, legs: Sequence[Leg], others: float) -> Guess:
        """Beside what the first form foretells."""
        roomy = self._told(self._roomy, tokens, self._places.wait(view, legs))
        return Guess(len(legs), in_turn, roomy, self._told(self._among, tokens, self._turns(legs, others)))

    def take(self, guess: Guess, seconds: float) -> None:
        """What came of it."""
        self._rates.fading.is_news = True
        ahead, in_turn, *others = guess
        beside = others[self.divides].seconds
        apart, unit = in_turn - beside, in_turn + beside + ALLOWANCE
        of = alike = DULL
        if abs(apart) > TELLING * unit:
            seen = min(seconds, MOST_SURPRISE * max(in_turn, beside))
            of, alike = (seen - beside) * apart / (unit * unit), apart * apart / (unit * unit)
            self._show(ahead, abs(seen - beside) < abs(seen - in_turn))
        self._of = SHARE_MEMORY * self._of + of
        self._alike = SHARE_MEMORY * self._alike + alike
        self._fleet.share_of(of, alike)
        self._choose(*(((told.seconds - seconds) / (told.seconds + seconds + ALLOWANCE)) ** 2 for told in others))
        self.renew()
        self._learn(guess, seconds)

    def renew(self) -> None:
        """With what was seen of all pods."""
        share = (self._of + OF_ALL * self._fleet.share) / (self._alike + OF_ALL)
        self.share = 0.0 if share < HARDLY else 1.0 if share > NEARLY else share

    def _show(self, ahead: int, was_right: bool) -> None:
        """A line of so many was not one, or was."""
        reach = FURTHER * (ahead + 1) if was_right else FIRST_SHOWN
        self._shown = max(reach, FIRST_SHOWN, SHOWN_MEMORY * self._shown)

    def _turns(self, legs: Sequence[Leg], others: float) -> tuple[float, float]:
        tokens, per_token = ahead(legs, self._fleet.prompt)
        unit = self.load * TOKEN_SCALE
        return unit * (tokens + others), unit * per_token

    def _told(self, terms: Regression, tokens: float, wait: tuple[float, float]) -> Told:
        load, (more, per_token) = self.load, wait
        features = (load, load * tokens * TOKEN_SCALE, more + tokens * per_token)
        return Told(terms.predict(features), features)

    def _learn(self, guess: Guess, seconds: float) -> None:
        fleet = self._fleet
        if self._roomy.observe(guess.beside.features, seconds, ALLOWANCE):
            fleet.beside.observe(guess.beside.features, seconds, ALLOWANCE)
        if self._among.observe(guess.among.features, seconds, ALLOWANCE):
            fleet.among.observe(guess.among.features, seconds, ALLOWANCE)

    def _choose(self, roomy: float, among: float) -> None:
        self._off = SHARE_MEMORY * self._off[0] + roomy, SHARE_MEMORY * self._off[1] + among
        self._fleet.off_by(roomy, among)
        off = [own + OF_ALL * others for own, others in zip(self._off, self._fleet.off, strict=True)]
        if off[not self.divides] < DIVIDED * off[self.divides]:
            self.divides = not self.divides
