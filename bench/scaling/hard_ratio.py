"""A hard ratio of two roles, as kthena repairs it: whatever each asked for, the quotient of both stays in a range."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardRatio:
    """`low` <= numerator / denominator <= `high`. Rather than take replicas away it adds some to the other role."""

    numerator: str
    denominator: str
    low: float
    high: float

    def repair(self, replicas: dict[str, int], bounds: dict[str, tuple[int, int]]) -> dict[str, int]:
        """Both zero stays so; a role that is zero beside one that is not gets a replica first."""
        clipped = {name: min(max(count, bounds[name][0]), bounds[name][1]) for name, count in replicas.items()}
        above, below = clipped[self.numerator], clipped[self.denominator]
        if above == below == 0:
            return clipped
        above, below = max(above, 1), max(below, 1)
        if above < self.low * below - _EXACT:
            above, below = self._raise_numerator(below, bounds[self.numerator][1])
        elif above > self.high * below + _EXACT:
            above, below = self._raise_denominator(above, bounds[self.denominator][1])
        return {**clipped, self.numerator: above, self.denominator: below}

    def _raise_numerator(self, below: int, most: int) -> tuple[int, int]:
        wanted = math.ceil(self.low * below - _EXACT)
        return (wanted, below) if wanted <= most else (most, math.floor(most / self.low + _EXACT))

    def _raise_denominator(self, above: int, most: int) -> tuple[int, int]:
        wanted = math.ceil(above / self.high - _EXACT)
        return (above, wanted) if wanted <= most else (math.floor(self.high * most + _EXACT), most)


_EXACT = 1e-9
