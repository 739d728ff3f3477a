"""A linear model that learns as it goes: least squares that forget, without negative coefficients, hard to mislead."""

from __future__ import annotations

from collections.abc import Sequence

CLIP = 3.0
"""A residual counts for at most so many times the usual one."""

SCALE_MEMORY = 0.9
"""How much of the usual residual is kept with each observation."""


INERTIA = 1e-3
"""How much coefficients keep to where they are, where observations do not tell them apart."""


class Regression:
    """y = coefficients · features, over weighted observations of which older ones count for less.

    Solved together with a `prior`: pseudo-observations that count as much as `trust` real ones, and are all there is
    in the beginning.
    """

    __slots__ = ("_count", "_memory", "_moments", "_prior", "_targets", "_trust", "_weight", "coefficients", "scale")

    def __init__(self, prior: Regression | Sequence[float], memory: float, trust: float) -> None:
        """`prior` is another regression with as many features, or the coefficients to begin with; `memory` is how much
        of the past is kept with each observation. Features are best scaled to about 1."""
        self._memory = memory
        self._trust = trust
        self._prior = prior if isinstance(prior, Regression) else None
        self.coefficients = list(prior.coefficients if isinstance(prior, Regression) else prior)
        ridge = 0.0 if self._prior else trust
        self._moments = [[ridge * (row == column) for column in self._axes] for row in self._axes]
        self._targets = [ridge * coefficient for coefficient in self.coefficients]
        self._weight = 0.0
        self._count = 0.0
        self.scale = 0.5
        """Mean absolute residual, as a share of what was predicted and `allowance`."""

    def current(self) -> list[float]:
        """The coefficients; those of the prior before the first observation."""
        return self.coefficients if self._count or self._prior is None else self._prior.coefficients

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.current(), features))

    def observe(self, features: Sequence[float], target: float, allowance: float) -> None:
        """`allowance` is the error that no prediction is free of: it decides how much small targets count."""
        predicted = self.predict(features)
        unit = predicted + allowance
        residual = (target - predicted) / unit
        most = CLIP * self.scale
        clipped = min(most, max(-most, residual))
        self.scale = SCALE_MEMORY * self.scale + (1.0 - SCALE_MEMORY) * max(0.05, min(abs(residual), 2.0 * most))
        self._add(features, predicted + clipped * unit, 1.0 / unit)

    def _add(self, features: Sequence[float], target: float, weight: float) -> None:
        memory = self._memory
        self._count = memory * self._count + 1.0
        self._weight = memory * self._weight + weight
        for row, feature in enumerate(features):
            weighted, moments = weight * feature, self._moments[row]
            moments[:] = [memory * old + weighted * other for old, other in zip(moments, features, strict=True)]
            self._targets[row] = memory * self._targets[row] + weighted * target
        self.coefficients = self._solved()

    def _solved(self) -> list[float]:
        moments, targets = [list(row) for row in self._moments], list(self._targets)
        prior = self._prior
        if prior is not None and prior._weight:
            share = self._trust * self._weight / self._count / prior._weight
            for row in self._axes:
                moments[row] = [a + share * b for a, b in zip(moments[row], prior._moments[row], strict=True)]
                targets[row] += share * prior._targets[row]
        for at in self._axes:
            inertia = INERTIA * moments[at][at] + 1e-12
            moments[at][at] += inertia
            targets[at] += inertia * self.coefficients[at]
        return non_negative(moments, targets)

    @property
    def _axes(self) -> range:
        return range(len(self.coefficients))


def non_negative(moments: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The solution of normal equations; a coefficient that would be negative is 0, the most negative one first."""
    active = list(range(len(targets)))
    while active:
        solution = solve([[moments[row][column] for column in active] for row in active], [targets[row] for row in active])
        lowest = min(range(len(active)), key=solution.__getitem__)
        if solution[lowest] >= 0.0:
            found = dict(zip(active, solution, strict=True))
            return [found.get(at, 0.0) for at in range(len(targets))]
        del active[lowest]
    return [0.0] * len(targets)


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss, for the symmetric positive definite matrices of a regression: they need no pivots."""
    size = len(right)
    for column in range(size):
        pivot = matrix[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / pivot[column]
            matrix[row] = [a - factor * b for a, b in zip(matrix[row], pivot, strict=True)]
            right[row] -= factor * right[column]
    for row in reversed(range(size)):
        known = sum(matrix[row][other] * right[other] for other in range(row + 1, size))
        right[row] = (right[row] - known) / matrix[row][row]
    return right
