"""Searches a configuration's knobs for what would have served recorded requests better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from proxy.core.errors import KvlaneError
from proxy.lab.figures import Fared
from proxy.lab.gain import Gain, Objective, gain
from proxy.lab.knobs import SMALLEST, Knob, Tunable, Values
from proxy.lab.replay import Fleet, replay
from proxy.lab.workload import Workload
from proxy.settings import Settings

TUNED = 0.6
"""The share of the requests, the earliest, that is searched on; the others are held out."""

FEWEST = 200
"""Requests that a search needs."""

SPREAD = 1.2
"""Standard deviation of the logarithm of what a knob is multiplied by."""

UNTOUCHED, OFF, ANEW = 0.3, 0.1, 0.2
"""Chances that a knob of a random candidate stays as it is, that it is set to its least, and that it is drawn from all
that may be tried."""

DECADES = 4.0
"""Of what may be tried, below the most."""

RUNGS = (0.25, 0.5, 1.0)
"""Shares of the requests that candidates are tried on; after each a third of them goes on."""

STEPS = (2.0, 0.5, 1.25, 0.8)
"""What one knob after the other is multiplied by, at the end."""

WORTH = 0.005
"""A change that gains less is not made."""

HELD_OUT_SEEDS = 3

Say = Callable[[str], None]


class TooFew(KvlaneError):
    """Too few requests, or nothing to tune."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best values that were found, and what they gain on the requests that were held out."""

    values: Values
    gain: Gain
    runs: int


def tune(
    tunable: Tunable, workload: Workload, fleet: Fleet, objective: Objective, trials: int, seed: int, say: Say
) -> Tuned:
    """`trials` is the number of random candidates. Raises TooFew."""
    jobs = len(workload.jobs)
    if jobs < FEWEST:
        raise TooFew(f"{jobs} requests are too few to tune on; {FEWEST} is the least, and thousands are better")
    if not tunable.knobs:
        raise TooFew("there is nothing to tune: no profile has two scorers, and none scores by predicted latency")
    first = int(jobs * TUNED)
    search = _Search(tunable, workload.window(0, first), fleet, objective, seed, say)
    best = search.climbed(search.halved(trials))
    held_out = workload.window(first, jobs - first)
    before, after = (_held_out(tunable.settings(values), held_out, fleet, seed) for values in (tunable.values, best))
    return Tuned(best, gain(before, after, objective, Random(seed)), search.runs)


def _held_out(settings: Settings, workload: Workload, fleet: Fleet, seed: int) -> list[Sequence[Fared]]:
    return [replay(settings, _from_zero(workload), fleet, seed + 1 + at).fared for at in range(HELD_OUT_SEEDS)]


def _from_zero(workload: Workload) -> Workload:
    return workload.at_rate(workload.rate)


class _Search:
    """Every candidate meets the same requests and the same dice."""

    def __init__(
        self, tunable: Tunable, workload: Workload, fleet: Fleet, objective: Objective, seed: int, say: Say
    ) -> None:
        self._tunable = tunable
        self._workload = workload
        self._fleet = fleet
        self._objective = objective
        self._seed = seed
        self._rng = Random(seed)
        self._say = say
        self._costs: dict[tuple[Values, float], float] = {}

    @property
    def runs(self) -> int:
        return len(self._costs)

    def halved(self, trials: int) -> Values:
        """The best of so many random candidates, by successive halving; what is there already is never dropped."""
        own = self._tunable.values
        candidates = list(dict.fromkeys([own, *(self._drawn() for _ in range(trials))]))
        for share in RUNGS:
            candidates.sort(key=lambda values: self._cost(values, share))
            self._say(f"{len(candidates)} candidates on {share:.0%}: best {self._cost(candidates[0], share):.4g}")
            if share < RUNGS[-1]:
                kept = candidates[: max(2, -(-len(candidates) // 3))]
                candidates = kept if own in kept else [*kept, own]
        return candidates[0]

    def climbed(self, best: Values) -> Values:
        """One knob after the other, a little up and down."""
        for at, knob in enumerate(self._tunable.knobs):
            for step in STEPS:
                value = knob.within((best[at] or SMALLEST) * step)
                other = (*best[:at], value, *best[at + 1 :])
                if self._cost(other, 1.0) < self._cost(best, 1.0) * (1.0 - WORTH):
                    best = other
                    self._say(f"{knob} = {value:g}: {self._cost(best, 1.0):.4g}")
        return best

    def _drawn(self) -> Values:
        return tuple(self._turned(knob) for knob in self._tunable.knobs)

    def _turned(self, knob: Knob) -> float:
        chance = self._rng.random()
        if chance < UNTOUCHED:
            return knob.value
        if chance < UNTOUCHED + OFF:
            return knob.least
        if chance < UNTOUCHED + OFF + ANEW:
            return knob.within(knob.most / 10.0 ** self._rng.uniform(0.0, DECADES))
        return knob.within((knob.value or SMALLEST) * self._rng.lognormvariate(0.0, SPREAD))

    def _cost(self, values: Values, share: float) -> float:
        """Of the first share of the requests."""
        known = self._costs.get((values, share))
        if known is None:
            part = _from_zero(self._workload.window(0, max(1, int(len(self._workload.jobs) * share))))
            run = replay(self._tunable.settings(values), part, self._fleet, self._seed)
            known = self._costs[values, share] = self._objective(run.fared)
        return known
