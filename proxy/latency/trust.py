"""Whether predictions are acted upon: not while they are bad, and not for longer each time that this ends too soon."""

from __future__ import annotations

from math import inf

AGAIN = 0.8
"""Predictions are trusted again when the error is below this share of the limit."""

FIRST_PAUSE, MOST_PAUSE = 50, 6_400
"""Predictions. While they are not acted upon, pods may be used so evenly that they are good, only to be bad again."""

SOON = 4.0
"""Trust that is lost after fewer than so many pauses' predictions doubles the pause."""


class Trust:
    """`limit` is the relative error. Lives as long as what predicts."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.is_given = True
        self._pause = FIRST_PAUSE
        self._changed_at = -inf
        """How many predictions had been judged then."""

    def judge(self, error: float, judged: int) -> bool:
        """So many predictions have been judged by now. True if trust was lost or given again."""
        since = judged - self._changed_at
        if self.is_given:
            if error <= self.limit:
                return False
            self._pause = min(MOST_PAUSE, 2 * self._pause) if since < SOON * self._pause else FIRST_PAUSE
        elif error >= AGAIN * self.limit or since < self._pause:
            return False
        self.is_given = not self.is_given
        self._changed_at = judged
        return True
