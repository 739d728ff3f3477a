"""Online linear regression: least squares with forgetting, non-negative coefficients and robustness to outliers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import add, mul

CLIP = 3.0
"""Residuals are clipped at this multiple of the usual residual."""

SCALE_MEMORY = 0.9
"""Weight of the previous usual residual at each observation."""

LEAST_SCALE = 0.05
FIRST_SCALE = 0.5

INERTIA = 1e-3
"""Ridge towards the current coefficients, for features that the observations do not distinguish."""


SOLVE_EAGERLY = 4
"""Coefficients are solved at the latest when one of this many observations has not been used."""

FORGOTTEN = 0.01
"""Observations with less weight than this are not faded further."""

Features = tuple[float, float, float]


class Regression:
    """y = coefficients · features, with less weight for older observations.

    An observation is weighted by the inverse of its expected error, which grows with the prediction. Its residual is
    clipped at `CLIP` times the usual residual, so an outlier has little effect, and a lasting change soon raises the
    usual residual.
    """

    def __init__(
        self,
        prior: Regression | Features,
        memory: float,
        prior_weight: float,
        shrink: Features = (0.0, 0.0, 0.0),
        every: int = 1,
    ) -> None:
        """`prior` are coefficients, or a regression whose current coefficients are used. It has the weight of
        `prior_weight` observations, and is the only source before the first observation. `memory` is the factor of the
        weight of earlier observations at each observation. `shrink`: extra ridge per coefficient, as a share of its
        diagonal entry; of two features that explain the same, the one without it gets the weight. Coefficients are
        solved after every `every` observations, because solving is slow. Features must be scaled to about 1."""
        self._prior = prior if isinstance(prior, Regression) else None
        self._coefficients: Sequence[float] = prior.coefficients if isinstance(prior, Regression) else prior
        self._memory = memory
        self._prior_weight = prior_weight
        self._shrink = shrink
        self._every = every
        self._sums = _sums_at(self._coefficients, 0.0 if self._prior else prior_weight)
        """Sums of products of the features, the upper triangle row by row, and of each feature with the target."""
        self._weight = 0.0
        self._count = 0.0
        self._unsolved = 0
        self._scale = FIRST_SCALE
        self.observed = 0
        """Number of observations."""

    @property
    def coefficients(self) -> Sequence[float]:
        return self._coefficients if self._count or self._prior is None else self._prior.coefficients

    @property
    def has_own(self) -> bool:
        """Whether the coefficients are its own, and not the prior regression's."""
        return bool(self._count)

    def start_at(self, coefficients: Sequence[float], weight: float) -> None:
        """Continue from coefficients that were learned elsewhere, with the weight of so many observations."""
        self._coefficients = coefficients
        self._sums = _sums_at(coefficients, weight)
        self._count = self._weight = weight

    def predict(self, features: Features) -> float:
        a, b, c = self.coefficients
        x, y, z = features
        return a * x + b * y + c * z

    def observe(self, features: Features, target: float, allowance: float) -> bool:
        """Learn from an observation. `allowance` is the error of the smallest targets. Return whether the coefficients
        were solved; in this case the prior regression has learned from this observation too."""
        predicted = self.predict(features)
        unit = predicted + allowance
        residual = (target - predicted) / unit
        most = CLIP * self._scale
        usual = min(abs(residual), 2.0 * most)
        self._scale = max(LEAST_SCALE, SCALE_MEMORY * self._scale + (1.0 - SCALE_MEMORY) * usual)
        self._add(features, predicted + min(most, max(-most, residual)) * unit, 1.0 / unit)
        self.observed += 1
        self._unsolved += 1
        if self._unsolved < self._every and self._unsolved * SOLVE_EAGERLY < self.observed:
            return False
        self._unsolved = 0
        self._coefficients = self._solved()
        if self._prior is not None:
            self._prior.observe(features, target, allowance)
        return True

    def fade(self, left: float) -> None:
        """Multiply the weight of all observations by this share."""
        if self._count > FORGOTTEN:
            self._count *= left
            self._weight *= left
            self._sums = [left * own for own in self._sums]
            self._coefficients = self._solved()

    def _add(self, features: Features, target: float, weight: float) -> None:
        memory, (x, y, z) = self._memory, features
        u, v, w = weight * x, weight * y, weight * z
        products = (u * x, u * y, u * z, v * y, v * z, w * z, u * target, v * target, w * target)
        self._count = memory * self._count + 1.0
        self._weight = memory * self._weight + weight
        self._sums = list(map(add, map(mul, self._sums, repeat(memory)), products))

    def _solved(self) -> list[float]:
        sums, prior = self._sums, self._prior
        if prior is not None and prior._weight:
            share = self._prior_weight * self._weight / self._count / prior._weight
            sums = [own + share * other for own, other in zip(sums, prior._sums, strict=True)]
        a, b, c, d, e, f, *targets = sums
        moments = [[a, b, c], [b, d, e], [c, e, f]]
        for at, coefficient in enumerate(self._coefficients):
            inertia = INERTIA * moments[at][at] + 1e-12
            moments[at][at] += inertia + self._shrink[at] * moments[at][at]
            targets[at] += inertia * coefficient
        return non_negative(moments, targets)


def _sums_at(coefficients: Sequence[float], weight: float) -> list[float]:
    """Return the sums of observations of each feature alone that these coefficients explain."""
    a, b, c = coefficients
    return [weight, 0.0, 0.0, weight, 0.0, weight, weight * a, weight * b, weight * c]


def non_negative(moments: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the solution of normal equations. The lowest negative coefficient is set to 0 until no coefficient is
    negative."""
    active = list(range(len(targets)))
    while active:
        square = [[moments[row][column] for column in active] for row in active]
        solution = solve(square, [targets[row] for row in active])
        lowest = min(range(len(active)), key=solution.__getitem__)
        if solution[lowest] >= 0.0:
            found = dict(zip(active, solution, strict=True))
            return [found.get(at, 0.0) for at in range(len(targets))]
        del active[lowest]
    return [0.0] * len(targets)


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return the solution by Gaussian elimination, without pivoting because the matrix is positive definite. Both
    arguments are modified."""
    size = len(right)
    for column, pivot in enumerate(matrix):
        for row in range(column + 1, size):
            factor = matrix[row][column] / pivot[column]
            matrix[row] = [a - factor * b for a, b in zip(matrix[row], pivot, strict=True)]
            right[row] -= factor * right[column]
    for row in reversed(range(size)):
        known = sum(matrix[row][other] * right[other] for other in range(row + 1, size))
        right[row] = (right[row] - known) / matrix[row][row]
    return right
