"""Whether predictions are acted upon: not while they are bad."""

from __future__ import annotations

AGAIN = 0.8
"""Predictions are trusted again when the error is below this share of the limit."""


class Trust:
    """`limit` is the relative error. Lives as long as what predicts."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.is_given = True

    def judge(self, error: float) -> bool:
        """True if trust was lost or given again."""
        was_given = self.is_given
        self.is_given = error <= self.limit if was_given else error < AGAIN * self.limit
        return self.is_given != was_given
