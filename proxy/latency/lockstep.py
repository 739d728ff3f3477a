"""Whether the data-parallel ranks of a pod step together.

The ranks of a mixture-of-experts model exchange data in every layer, so an engine step takes as long as that of the
slowest rank: a prompt on one rank delays the responses on all of them. The ranks of a dense model are independent.
Responses show which of both holds: whether one slows down while other ranks compute prompts.
"""

from __future__ import annotations

MEMORY = 0.99
"""What is left of a lesson after the next one."""

CAUTION = 0.02
"""Lessons must show so much variance before the share is taken as it is."""


class Lockstep:
    """What the models of a pod's ranks have in common. `share` is 0 for independent ranks, 1 for those that step
    together."""

    __slots__ = ("_lessons", "_means", "_squares", "_together", "prefilled", "running", "share")

    def __init__(self) -> None:
        self.share = 0.0
        self.running = 0
        """Requests that run on all ranks, as their models have published them."""
        self.prefilled = 0.0
        """Seconds of prefill on all ranks, in sum."""
        self._lessons = 0.0
        self._means = (0.0, 0.0)
        self._squares = self._together = 0.0

    def observe(self, elsewhere: float, delay: float) -> None:
        """Learn from one response. `elsewhere` are the seconds that other ranks computed prompts per second of the
        response, `delay` is the part of its time that its own rank does not explain.

        The slope is that of a line with an intercept: the pace that a rank has learnt may include the mean delay."""
        elsewhere, delay = min(1.0, elsewhere), min(1.0, max(-1.0, delay))
        self._lessons = MEMORY * self._lessons + 1.0
        x, y = self._means
        dx, dy = elsewhere - x, delay - y
        self._means = (x + dx / self._lessons, y + dy / self._lessons)
        self._squares = MEMORY * self._squares + dx * (elsewhere - self._means[0])
        self._together = MEMORY * self._together + dx * (delay - self._means[1])
        self.share = min(1.0, max(0.0, self._together / (self._squares + CAUTION)))
