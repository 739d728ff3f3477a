"""Non-negative least squares of a few unknowns: what nobody could explain with less than nothing counts as nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Row = tuple[Sequence[float], float]
"""(what each unknown counts in it, what came of it)."""

TINY = 1e-12


def fitted(rows: Sequence[Row], unknowns: int) -> list[float]:
    """The least squares of relative errors: every row is divided by what came of it. An unknown that would be negative
    is 0, and the others are fitted without it; so is one that the rows say nothing about."""
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
    """The normal equations of the active unknowns, each in units of its own size, by Gauss and Jordan."""
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
