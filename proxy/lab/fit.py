"""Fit of the cost of an engine step to the recorded times of pods, by least squares."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from proxy.core.errors import KvlaneError
from proxy.lab.record import ObservedRequest, TraceRecord
from proxy.lab.sim import StepTiming
from proxy.lab.workload import Job

Row = tuple[Sequence[float], float]
"""(the coefficient of each unknown, the measured value)."""

TINY = 1e-12


def fitted(rows: Sequence[Row], unknowns: int) -> list[float]:
    """Return the least-squares solution for relative errors: every row is divided by its measured value. An unknown
    that would be negative is 0, and the others are fitted without it. An unknown without coefficients is 0 too."""
    scaled = [([value / seen for value in values], 1.0) for values, seen in rows if seen > 0.0]
    active = [at for at in range(unknowns) if any(values[at] for values, _ in scaled)]
    while active:
        solution = _solved(scaled, active)
        worst = min(range(len(active)), key=lambda at: solution[at])
        if solution[worst] >= 0.0:
            found = dict(zip(active, solution, strict=True))
            return [found.get(at, 0.0) for at in range(unknowns)]
        del active[worst]
    return [0.0] * unknowns


def predicted(coefficients: Sequence[float], values: Sequence[float]) -> float:
    return sum(one * value for one, value in zip(coefficients, values, strict=True))


def _solved(rows: Sequence[Row], active: Sequence[int]) -> list[float]:
    """Solve the normal equations of the active unknowns by Gauss-Jordan elimination. Each column is scaled to length
    1."""
    columns = [[values[at] for values, _ in rows] for at in active]
    sizes = [_product(column, column) ** 0.5 for column in columns]
    units = [[value / size for value in column] for column, size in zip(columns, sizes, strict=True)]
    seen = [came for _, came in rows]
    system = [[*(_product(one, other) for other in units), _product(one, seen)] for one in units]
    count = len(active)
    for at in range(count):
        pivot = max(range(at, count), key=lambda row: abs(system[row][at]))
        system[at], system[pivot] = system[pivot], system[at]
        if abs(system[at][at]) < TINY:
            system[at] = [0.0] * (count + 1)
            system[at][at] = 1.0
        lead = system[at][at]
        system[at] = [value / lead for value in system[at]]
        for row in range(count):
            if row != at and (factor := system[row][at]):
                system[row] = [value - factor * ours for value, ours in zip(system[row], system[at], strict=True)]
    return [system[at][count] / size for at, size in enumerate(sizes)]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(mul, one, other))


FEWEST = 20
"""Smallest number of streams, and of first tokens on idle pods, that a fit needs."""

FEWEST_OF_POD = 8
"""Smallest number of known times of a pod for a slowdown of its own. Slow pods get few requests."""

MOST_ROWS = 20_000

ROUNDS = 4

ALIKE = 0.1
"""Difference of slowdowns below which pods count as equally fast."""

OUTLIER = 4.0
"""Rows whose relative error is this many times the median error are left out, and the rest is fitted again."""

TOGETHER = 0.25
"""Responses whose steps took less than this share of the median arrived in one piece after a pause: they do not show
the pace of their pod, and because errors count relatively they would dominate the fit."""

UNKNOWNS = 5
"""The number of unknowns: base, per_prefill_token, per_sequence, per_attended, per_token_read; see `StepTiming`."""


class TooLittle(KvlaneError):
    """The record contains too little data to fit the speed of its pods."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a fit. `slowdowns` maps each pod to the factor by which its steps take longer than `timing`.
    `first_token` and `pace` are median errors, as shares of the measured value, of times to the first token on idle
    pods and of times from the first token to the end; `first_tokens` and `paces` are the numbers of requests that were
    compared."""

    timing: StepTiming
    slowdowns: Mapping[str, float]
    first_token: float
    first_tokens: int
    pace: float
    paces: int


@dataclass(frozen=True, slots=True)
class _Stay:
    """The time that one request spent on its pod."""

    job: Job
    seen: ObservedRequest
    start: float
    first: float
    end: float


def fit(record: TraceRecord, budget: int) -> Fit:
    """Return the fit for a record. `budget` is the largest number of tokens that a step computes. Raise TooLittle."""
    by_pod: defaultdict[str, list[_Stay]] = defaultdict(list)
    for job, seen in zip(record.workload.jobs, record.seen, strict=bool(record.seen)):
        if seen.ttft is not None:
            start = job.arrival
            by_pod[seen.pod].append(_Stay(job, seen, start, start + seen.ttft, start + seen.duration))
    firsts = {pod: _first_tokens(stays, budget) for pod, stays in by_pod.items()}
    paces = {pod: _paces(stays) for pod, stays in by_pod.items()}
    met, whole = sum(map(len, firsts.values())), sum(map(len, paces.values()))
    if met < FEWEST or whole < FEWEST:
        raise TooLittle(
            f"the record has {met} streams that met an idle pod and {whole} whole ones, and a fit needs {FEWEST} of"
            " each; say with --hardware what the pods are like"
        )
    slow = _slowdowns({pod: [*firsts[pod], *paces[pod]] for pod in by_pod})
    firsts, paces = _as_if_alike(firsts, slow), _as_if_alike(paces, slow)
    timing = fitted(_without_outliers([*_all(firsts), *_all(paces)]), UNKNOWNS)
    return Fit(StepTiming(*timing), slow, _error(timing, _all(firsts)), met, _error(timing, _all(paces)), whole)


def _first_tokens(stays: Sequence[_Stay], budget: int) -> list[Row]:
    """Return the rows of requests that were alone on their pod until their first token."""
    return [
        _first_token(stay, budget) for stay, company in _in_company(stays) if not company and stay.first > stay.start
    ]


def _paces(stays: Sequence[_Stay]) -> list[Row]:
    timely = sorted(stays, key=lambda stay: stay.start)
    begins = [stay.start for stay in timely]
    longest = max(stay.end - stay.start for stay in timely)
    found = []
    for stay in timely:
        if stay.job.output_tokens > 1 and stay.seen.is_whole and stay.end > stay.first:
            near = timely[bisect_left(begins, stay.first - longest) : bisect_right(begins, stay.end)]
            found.append(_pace(stay, [one for one in near if one is not stay and one.end > stay.first]))
    least = TOGETHER * _median([_step(row) for row in found])
    return [row for row in found if _step(row) >= least]


def _step(pace: Row) -> float:
    (steps, *_), seconds = pace
    return seconds / steps


def _slowdowns(rows: Mapping[str, list[Row]]) -> dict[str, float]:
    """Return the slowdown of each pod relative to the median pod; 1 for a pod close to it. A fit to all pods and the
    slowdowns relative to that fit are computed in turns, `ROUNDS` times."""
    slow = dict.fromkeys(rows, 1.0)
    for _ in range(ROUNDS):
        timing = fitted(_without_outliers(_all(_as_if_alike(rows, slow))), UNKNOWNS)
        factors = {pod: _factor(timing, of_pod) for pod, of_pod in rows.items()}
        middle = _median(list(factors.values())) or 1.0
        slow = {pod: factor / middle for pod, factor in factors.items()}
    return {pod: round(factor, 1) if abs(factor - 1.0) >= ALIKE else 1.0 for pod, factor in slow.items()}


def _factor(timing: Sequence[float], rows: Sequence[Row]) -> float:
    """Return how many times longer the steps of a pod take; 1 if the pod has too few rows."""
    ratios = [seen / guess for values, seen in rows if (guess := predicted(timing, values)) > 0.0]
    return _median(ratios) if len(ratios) >= FEWEST_OF_POD else 1.0


def _as_if_alike(rows: Mapping[str, list[Row]], slow: Mapping[str, float]) -> dict[str, list[Row]]:
    return {pod: [(values, seen / slow[pod]) for values, seen in of_pod] for pod, of_pod in rows.items()}


def _all(rows: Mapping[str, list[Row]]) -> list[Row]:
    """Return the rows of all pods, thinned to a number that a fit can process in seconds."""
    found = [row for of_pod in rows.values() for row in of_pod]
    return found[:: -(-len(found) // MOST_ROWS)] if found else []


def _in_company(stays: Sequence[_Stay]) -> Iterator[tuple[_Stay, int]]:
    """Yield each request with the number of other requests that were on the pod when it arrived, or arrived before its
    first token."""
    begins = sorted(stay.start for stay in stays)
    ends = sorted(stay.end for stay in stays)
    for stay in stays:
        here = bisect_left(begins, stay.start) - bisect_right(ends, stay.start)
        yield stay, here + bisect_right(begins, stay.first) - bisect_left(begins, stay.start) - 1


def _uncached(stay: _Stay) -> int:
    return max(1, stay.job.prompt_tokens - (stay.seen.cached_tokens or 0))


def _attended(stay: _Stay) -> float:
    uncached = _uncached(stay)
    return uncached * (stay.job.prompt_tokens - uncached / 2)


def _first_token(stay: _Stay, budget: int) -> Row:
    uncached = _uncached(stay)
    steps = math.ceil(uncached / budget)
    return (steps, uncached, steps, _attended(stay), 0.0), stay.first - stay.start


def _pace(stay: _Stay, others: Sequence[_Stay]) -> Row:
    """Return the row for the time from the first token to the last: a step per token with all decoding sequences, and
    the prompts in between."""
    seconds, steps = stay.end - stay.first, stay.job.output_tokens - 1
    sequences, prefill, attended = float(steps), 0.0, 0.0
    read = steps * (stay.job.prompt_tokens + steps / 2)
    for other in others:
        share = max(0.0, min(stay.end, other.end) - max(stay.first, other.first)) / seconds
        sequences += steps * share
        read += steps * share * (other.job.prompt_tokens + other.job.output_tokens / 2)
        if stay.first < other.first <= stay.end:
            prefill += _uncached(other)
            attended += _attended(other)
    return (steps, prefill, sequences, attended, read), seconds


def _without_outliers(rows: Sequence[Row]) -> list[Row]:
    first = fitted(rows, UNKNOWNS)
    errors = [_relative(first, row) for row in rows]
    limit = OUTLIER * max(_median(errors), 0.01)
    return [row for row, error in zip(rows, errors, strict=True) if error <= limit]


def _error(timing: Sequence[float], rows: Sequence[Row]) -> float:
    return _median([_relative(timing, row) for row in rows])


def _relative(timing: Sequence[float], row: Row) -> float:
    values, seen = row
    return abs(predicted(timing, values) / seen - 1.0)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.nan
