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
from proxy.latency.regression import non_negative

Row = tuple[Sequence[float], float]
"""(the coefficient of each unknown, the measured value)."""

RIDGE = 1e-9
"""Added to the diagonal of the normal equations, so that they have a solution where rows do not tell unknowns apart."""


def fitted(rows: Sequence[Row], unknowns: int) -> list[float]:
    """Return the least-squares solution without negative unknowns, for relative errors: every row is divided by its
    measured value. Columns are scaled to length 1."""
    scaled = [[value / seen for value in values] for values, seen in rows if seen > 0.0]
    columns = [[values[at] for values in scaled] for at in range(unknowns)]
    sizes = [_product(column, column) ** 0.5 or 1.0 for column in columns]
    units = [[value / size for value in column] for column, size in zip(columns, sizes, strict=True)]
    moments = [[_product(one, other) + RIDGE * (one is other) for other in units] for one in units]
    solution = non_negative(moments, [math.fsum(unit) for unit in units])
    return [value / size for value, size in zip(solution, sizes, strict=True)]


def predicted(coefficients: Sequence[float], values: Sequence[float]) -> float:
    return _product(coefficients, values)


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
    firsts = {
        pod: [_first_token(stay, budget) for stay in _alone(stays) if stay.first > stay.start]
        for pod, stays in by_pod.items()
    }
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


def _alone(stays: Sequence[_Stay]) -> Iterator[_Stay]:
    """Yield the requests that were alone on their pod from their arrival to their first token."""
    begins = sorted(stay.start for stay in stays)
    ends = sorted(stay.end for stay in stays)
    for stay in stays:
        if bisect_right(begins, stay.first) - bisect_right(ends, stay.start) == 1:
            yield stay


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
