"""Search for weights of a configuration that would have served recorded requests better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from proxy.core.errors import KvlaneError
from proxy.core.ports import Clock, ManualClock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.lab.replay import ReplayedFleet, RequestResult, mean, percentile, replay
from proxy.lab.workload import Workload
from proxy.scheduling.build import Effective, EffectivePlugin, build
from proxy.scheduling.document import read
from proxy.scheduling.layout import ProfileLayout, ValueOrigin
from proxy.settings import Settings

NEVER = 120.0
"""Seconds that count for a request without a response."""

BLOCKS = 50
"""Number of blocks of consecutive requests that the bootstrap draws from. Neighbouring requests wait for each other, so
they are drawn together."""

DRAWS = 500

Run = Sequence[RequestResult]

Objective = Callable[[Run], float]
"""The figure to minimise."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The relative reduction from `before` to `after`; `low` and `high` are the bounds of its 95 % confidence
    interval."""

    before: float
    after: float
    share: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        return self.low > 0.0


def ttft_mean(found: Run) -> float:
    return mean([min(one.ttft, NEVER) for one in found])


def missed(found: Run) -> float:
    return 1.0 - sum(one.is_good for one in found) / len(found)


OBJECTIVES: Mapping[str, tuple[Objective, str]] = {
    "ttft": (ttft_mean, "mean time to first token, s"),
    "ttft-p90": (
        lambda found: percentile(sorted(min(one.ttft, NEVER) for one in found), 0.9),
        "90th percentile of the time to first token, s",
    ),
    "e2e": (lambda found: mean([min(one.e2e, NEVER) for one in found]), "mean time to the last token, s"),
    "goodput": (missed, "share of requests that miss their objectives"),
}
"""Objectives and their titles, by the name that `kvlane tune` accepts."""


def gain(before: Sequence[Run], after: Sequence[Run], objective: Objective, rng: Random) -> Gain:
    """Return the gain of `after` over `before`; each has a list of the same requests per run. The confidence interval
    is that of a bootstrap over blocks of requests, with the same blocks for both."""
    pairs = [pair for runs in zip(before, after, strict=True) for pair in zip(*map(_blocks, runs), strict=True)]
    drawn = sorted(_compared(objective, rng.choices(pairs, k=len(pairs)))[2] for _ in range(DRAWS))
    return Gain(*_compared(objective, pairs), percentile(drawn, 0.025), percentile(drawn, 0.975))


def _blocks(found: Run) -> list[Run]:
    size = max(1, math.ceil(len(found) / BLOCKS))
    return [found[start : start + size] for start in range(0, len(found), size)]


def _compared(objective: Objective, pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float, float]:
    """Return the figure before and after, and the relative reduction."""
    before, after = (objective([one for block in blocks for one in block]) for blocks in zip(*pairs, strict=True))
    return before, after, (before - after) / before if before else 0.0


PARAMETERS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "latency-scorer": {"scaleSeconds": (0.02, 50.0)},
    "predicted-latency-producer": {"workCost": (0.0, 5.0), "decodeCost": (0.0, 1.0)},
}
"""Plugin type -> parameter -> the smallest and the largest value to try."""

REACH = 32.0
"""The largest weight to try is this many times the largest weight of the profile."""

SMALLEST = 0.01
"""Replaces a parameter or weight of 0 when it is multiplied."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A weight in a profile, or a parameter of a plugin. `owner` is the profile; empty for a parameter."""

    owner: str
    plugin: str
    name: str
    value: float
    least: float
    most: float

    def within(self, value: float) -> float:
        """Return the nearest value within the limits, rounded to three digits."""
        return float(f"{min(self.most, max(self.least, value)):.3g}")

    def __str__(self) -> str:
        return f"{self.owner}: weight of {self.plugin}" if self.owner else f"{self.plugin}: {self.name}"


Values = tuple[float, ...]
"""One value for each knob."""


class Tunable:
    """One configuration and its variants."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        registry = Registry.discover()
        ports = {Clock: ManualClock(), RandomPort: Random(0)}
        self._effective = build(settings.scheduling, registry, ports).effective
        scorers = {cls.plugin_type for cls in registry if cls.plugin_type.endswith("-scorer")}
        self.knobs = tuple(_knobs(self._effective, scorers))

    @property
    def values(self) -> Values:
        return tuple(knob.value for knob in self.knobs)

    @property
    def apart(self) -> list[str]:
        """Names of document plugins that belong to the data layer; sections do not contain them."""
        document = self._settings.scheduling
        known = {entry.label for entry in document.plugins}
        return [name for name in document.names if name not in known]

    def settings(self, values: Values) -> Settings:
        return replace(self._settings, scheduling=read(self.section(values), "scheduling"))

    def section(self, values: Values) -> dict[str, Any]:
        """Return the `scheduling` section with these values; unchanged defaults are omitted."""
        changed = {
            (knob.owner, knob.plugin, knob.name): value
            for knob, value in zip(self.knobs, values, strict=True)
            if knob.owner or value != knob.value
        }
        return {
            "plugins": [_plugin(plugin, changed) for plugin in self._effective.plugins],
            "schedulingProfiles": [_profile(profile, changed) for profile in self._effective.profiles],
        }


def _knobs(effective: Effective, scorers: set[str]) -> Iterator[Knob]:
    types = {plugin.name: plugin.type for plugin in effective.plugins}
    for profile in effective.profiles:
        uses = [use for use in profile.uses if types[use.ref] in scorers]
        if profile.shadow or len(uses) < 2:
            continue
        largest = max(use.weight for use in uses) or 1.0
        for use in uses:
            yield Knob(profile.name, use.ref, "weight", use.weight, 0.0, REACH * largest)
    for plugin in effective.plugins:
        limits = PARAMETERS.get(plugin.type, {})
        for name, (value, _) in plugin.parameters.items():
            if name in limits:
                yield Knob("", plugin.name, name, value, *limits[name])


def _plugin(plugin: EffectivePlugin, changed: Mapping[tuple[str, str, str], float]) -> dict[str, Any]:
    given = {name: value for name, (value, origin) in plugin.parameters.items() if origin is ValueOrigin.FILE}
    given |= {name: value for (owner, ref, name), value in changed.items() if not owner and ref == plugin.name}
    named = {"name": plugin.name} if plugin.name != plugin.type else {}
    return {"type": plugin.type, **named, **({"parameters": given} if given else {})}


def _profile(profile: ProfileLayout, changed: Mapping[tuple[str, str, str], float]) -> dict[str, Any]:
    uses = []
    for use in profile.uses:
        given = use.weight if use.weight_origin is ValueOrigin.FILE else None
        weight = changed.get((profile.name, use.ref, "weight"), given)
        uses.append({"pluginRef": use.ref, **({} if weight is None else {"weight": weight})})
    shadow = {"shadow": True} if profile.shadow else {}
    return {"name": profile.name, **shadow, "plugins": uses}


TUNED = 0.6
"""Share of the requests, the earliest, that the search uses; the others are held out."""

FEWEST = 200
"""Smallest number of requests for a search."""

SPREAD = 1.2
"""Standard deviation of the logarithm of the factor for a knob."""

UNTOUCHED, OFF, REDRAWN = 0.3, 0.1, 0.2
"""Probabilities that a knob of a random candidate keeps its value, is set to its smallest value, and is drawn from its
whole range."""

DECADES = 4.0
"""The whole range spans this many decades below the largest value."""

RUNGS = (0.25, 0.5, 1.0)
"""Shares of the requests that candidates are tried on; after each share, a third of the candidates remains."""

STEPS = (2.0, 0.5, 1.25, 0.8)
"""Factors that are tried on one knob after the other at the end of the search."""

WORTH = 0.005
"""Smallest relative gain for which a change is kept."""

HELD_OUT_SEEDS = 3

Say = Callable[[str], None]


class TooFew(KvlaneError):
    """The record has too few requests, or the configuration has no knobs."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best values that were found, and their gain on the held-out requests."""

    values: Values
    gain: Gain
    runs: int


def tune(
    tunable: Tunable, workload: Workload, fleet: ReplayedFleet, objective: Objective, trials: int, seed: int, say: Say
) -> Tuned:
    """Search for better values. `trials` is the number of random candidates. Raise TooFew."""
    jobs = len(workload.jobs)
    if jobs < FEWEST:
        raise TooFew(f"{jobs} requests are too few to tune on; {FEWEST} is the least, and thousands are better")
    if not tunable.knobs:
        raise TooFew("nothing to tune: no profile has two scorers, and none scores by predicted latency")
    first = int(jobs * TUNED)
    search = _Search(tunable, workload.window(0, first), fleet, objective, seed, Random(seed), say)
    best = search.climbed(search.halved(trials))
    rest, seeds = _from_zero(workload.window(first, jobs - first)), range(seed + 1, seed + 1 + HELD_OUT_SEEDS)
    before, after = (
        [replay(tunable.settings(values), rest, fleet, one).fared for one in seeds] for values in (tunable.values, best)
    )
    return Tuned(best, gain(before, after, objective, Random(seed)), len(search.costs))


def _from_zero(workload: Workload) -> Workload:
    return workload.at_rate(workload.rate)


@dataclass(slots=True)
class _Search:
    """A search in which every candidate gets the same requests and the same random numbers."""

    tunable: Tunable
    workload: Workload
    fleet: ReplayedFleet
    objective: Objective
    seed: int
    rng: Random
    say: Say
    costs: dict[tuple[Values, float], float] = field(default_factory=dict)

    def halved(self, trials: int) -> Values:
        """Return the best of this many random candidates, by successive halving; the values of the configuration are
        never dropped."""
        own = self.tunable.values
        drawn = [tuple(map(self._drawn, self.tunable.knobs)) for _ in range(trials)]
        candidates = list(dict.fromkeys([own, *drawn]))
        for share in RUNGS:
            candidates.sort(key=lambda values: self._cost(values, share))
            self.say(f"{len(candidates)} candidates on {share:.0%}: best {self._cost(candidates[0], share):.4g}")
            if share < RUNGS[-1]:
                kept = candidates[: max(2, -(-len(candidates) // 3))]
                candidates = kept if own in kept else [*kept, own]
        return candidates[0]

    def climbed(self, best: Values) -> Values:
        """Improve one knob after the other by small changes."""
        for at, knob in enumerate(self.tunable.knobs):
            for step in STEPS:
                value = knob.within((best[at] or SMALLEST) * step)
                other = (*best[:at], value, *best[at + 1 :])
                if self._cost(other, 1.0) < self._cost(best, 1.0) * (1.0 - WORTH):
                    best = other
                    self.say(f"{knob} = {value:g}: {self._cost(best, 1.0):.4g}")
        return best

    def _drawn(self, knob: Knob) -> float:
        chance = self.rng.random()
        if chance < UNTOUCHED:
            return knob.value
        if chance < UNTOUCHED + OFF:
            return knob.least
        if chance < UNTOUCHED + OFF + REDRAWN:
            return knob.within(knob.most / 10.0 ** self.rng.uniform(0.0, DECADES))
        return knob.within((knob.value or SMALLEST) * self.rng.lognormvariate(0.0, SPREAD))

    def _cost(self, values: Values, share: float) -> float:
        """Return the objective on the first share of the requests."""
        known = self.costs.get((values, share))
        if known is None:
            part = _from_zero(self.workload.window(0, max(1, int(len(self.workload.jobs) * share))))
            run = replay(self.tunable.settings(values), part, self.fleet, self.seed)
            known = self.costs[values, share] = self.objective(run.fared)
        return known
