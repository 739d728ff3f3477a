"""Open-loop loads: requests come when they come, whatever the fleet makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from types import MappingProxyType

from proxy.lab.workload import Job, named

MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Mean tokens of prompt and response; each request varies by up to half."""

    prompt: int
    output: int

    def job(self, arrival: float, number: int, rng: Random) -> Job:
        """No prompt is shared: its one piece is the request's own."""
        prompt, output = _about(self.prompt, rng), _about(self.output, rng)
        return Job(arrival, prompt, output, (number,), ends=(prompt,))


READ, WRITE = Kind(8_000, 100), Kind(500, 2_000)
"""Long prompts with short responses, which is work for prefill pods; and the reverse, for decode pods."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests per second of both kinds as a function of time and of the seed's dice, `most` of each at most, for
    `seconds`."""

    seconds: float
    most: tuple[float, float]
    rates: Callable[[Random], Callable[[float], tuple[float, float]]]

    def jobs(self, seed: int) -> tuple[Job, ...]:
        """Random arrivals at the given rates: arrivals of the highest rate, thinned."""
        rng = Random(seed)
        rates = self.rates(rng)
        found: list[Job] = []
        for side, kind in enumerate((READ, WRITE)):
            now = rng.expovariate(self.most[side])
            while now < self.seconds:
                if rng.random() * self.most[side] < rates(now)[side]:
                    found.append(kind.job(now, len(found), rng))
                now += rng.expovariate(self.most[side])
        return named(found)


def diurnal(rng: Random) -> Callable[[float], tuple[float, float]]:
    """A day in an hour, from a third of the peak to the peak and back."""
    return lambda now: (_day(now) * 4.5, _day(now) * 3.0)


def burst(rng: Random) -> Callable[[float], tuple[float, float]]:
    """Six minutes of four times as much, every 30 minutes more or less: of one kind, then of the other."""
    begins = [(at * 30 + rng.uniform(5, 20)) * MINUTE for at in range(3)]

    def rates(now: float) -> tuple[float, float]:
        on = [at for at, start in enumerate(begins) if start <= now < start + 6 * MINUTE]
        return (1.4 * (4 if on and on[0] % 2 == 0 else 1), 1.0 * (4 if on and on[0] % 2 else 1))

    return rates


def shift(rng: Random) -> Callable[[float], tuple[float, float]]:
    """From long prompts to long responses and back within ten and five minutes, twice; the sum is about constant."""
    return lambda now: _between((8.0, 0.8), (1.0, 5.8), _trapezoid(now / (30 * MINUTE)))


def mixed(rng: Random) -> Callable[[float], tuple[float, float]]:
    """A day whose mornings read and whose evenings write, with bursts of either kind at any time."""
    begins = sorted(rng.uniform(5, 55) * MINUTE for _ in range(4))
    sides = [rng.randrange(2) for _ in begins]

    def rates(now: float) -> tuple[float, float]:
        read, write = _between((6.0, 1.0), (1.5, 4.0), 0.5 - 0.5 * math.cos(2 * math.pi * now / (40 * MINUTE)))
        more = [1.0, 1.0]
        for start, side in zip(begins, sides, strict=True):
            if start <= now < start + 3 * MINUTE:
                more[side] = 2.0
        return read * _day(now) * more[0], write * _day(now) * more[1]

    return rates


def walk(rng: Random) -> Callable[[float], tuple[float, float]]:
    """Each kind by itself from one level to another, every four to twelve minutes: two times of three slowly, and else
    within half a minute."""
    paths = [_path(rng, low, high) for low, high in ((1.0, 5.0), (0.6, 3.2))]
    return lambda now: (_along(paths[0], now), _along(paths[1], now))


def drift(rng: Random) -> Callable[[float], tuple[float, float]]:
    """Each kind by itself about a mean, minute by minute, by dice: as a rule up to a half more or a third less, and
    what has gone off comes back within a quarter of an hour."""
    paths = [_drifting(rng, mean) for mean in (2.6, 1.7)]
    return lambda now: (_along(paths[0], now), _along(paths[1], now))


LOADS: Mapping[str, Load] = MappingProxyType(
    {
        "diurnal": Load(60 * MINUTE, (4.5, 3.0), diurnal),
        "burst": Load(90 * MINUTE, (5.6, 4.0), burst),
        "shift": Load(60 * MINUTE, (8.0, 5.8), shift),
        "mixed": Load(60 * MINUTE, (12.0, 8.0), mixed),
        "walk": Load(60 * MINUTE, (5.0, 3.2), walk),
        "drift": Load(60 * MINUTE, (6.5, 4.25), drift),
    }
)
"""By name. Policies are tuned on the others with seeds below 20, and judged on `drift` with seeds from 20 on."""


Path = Sequence[tuple[float, float]]
"""Moments and levels, with straight lines between them."""


def _path(rng: Random, low: float, high: float) -> Path:
    found = [(0.0, rng.uniform(low, high))]
    while found[-1][0] < 60 * MINUTE:
        start, level = found[-1]
        end, reached = start + rng.uniform(4, 12) * MINUTE, rng.uniform(low, high)
        if rng.random() < 1 / 3:
            found.append((end - MINUTE / 2, level))
        found.append((end, reached))
    return found


def _drifting(rng: Random, mean: float) -> Path:
    """The logarithm is an autoregressive process: 0.45 of spread, 12 minutes of memory; at most 2.5 times the mean."""
    keep = math.exp(-1 / 12)
    off, found = rng.gauss(0.0, 0.45), []
    for minute in range(61):
        found.append((minute * MINUTE, mean * min(math.exp(off), 2.5)))
        off = keep * off + rng.gauss(0.0, 0.45 * math.sqrt(1 - keep * keep))
    return found


def _along(path: Path, now: float) -> float:
    for (start, level), (end, reached) in pairwise(path):
        if now < end:
            return level + (reached - level) * (now - start) / (end - start)
    return path[-1][1]


def _about(mean: int, rng: Random) -> int:
    return rng.randint(mean // 2, mean + mean // 2)


def _day(now: float) -> float:
    return 2 / 3 - math.cos(2 * math.pi * now / (60 * MINUTE)) / 3


def _trapezoid(turns: float) -> float:
    """0 for the first third of a turn, rises to 1 in the second, and falls to 0 in the last sixth."""
    at = turns % 1.0
    return min(1.0, max(0.0, 3 * at - 1)) if at < 5 / 6 else 1 - 6 * (at - 5 / 6)


def _between(first: tuple[float, float], second: tuple[float, float], share: float) -> tuple[float, float]:
    return (first[0] + (second[0] - first[0]) * share, first[1] + (second[1] - first[1]) * share)
