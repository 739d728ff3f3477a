"""Ceilings that come down as the pods fill up, for lower bands further than for higher ones."""

from __future__ import annotations

from math import floor


class Reflection:
    """A band's ceiling is 1 - depth * saturation: 1 for the highest band, of depth 0, and as far from 1 as the
    saturation is for the lowest, of depth 1. A band at its ceiling goes on at one turn of saturation / (1 - saturation)
    of them, so that it fades out and does not stop.

    All bands have their turn at once: whoever looks for someone to let go on stops at the first band that may not, and
    with turns of their own a lower band might never have one in which the higher ones have theirs.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._is_open = True

    def turn(self, saturation: float) -> None:
        """Another one may go on."""
        if 1.0 - saturation <= saturation < 1.0:
            period = max(1, floor(saturation / (1.0 - saturation) + 0.5))
            self._turns += 1
            self._is_open = self._turns % period == 0

    def is_open(self, saturation: float, depth: float) -> bool:
        if saturation >= 1.0:
            return False
        return depth == 0.0 or saturation < 1.0 - depth * saturation or self._is_open
