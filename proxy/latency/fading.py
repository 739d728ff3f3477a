"""For how long a pod has shown nothing while others did.

A pod that looked slow once, after a cold start or a pause of its machine, is avoided while others are free, and so it
would never show that it is slow no longer. What it has shown counts less and less, so that it is tried again: if it is
still slow, one request has said so. At night nobody shows anything, and nothing is forgotten.
"""

from __future__ import annotations

from proxy.latency.fleet import FleetModel

QUIET_SECONDS = 5.0
"""For so long what was shown stays news."""

TURN_SECONDS = 1.0
"""It fades in turns: each takes 0.1 ms of a core."""


class Fading:
    """Of one pod. Lives as long as the pod's memory."""

    __slots__ = ("_age", "_asked_at", "_fleet", "_lessons", "_missed", "is_news")

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self._lessons = fleet.lessons
        self._asked_at: float | None = None
        self._age = self._missed = 0.0
        self.is_news = False
        """The pod has shown something since `seconds` was asked."""

    def seconds(self, now: float) -> float:
        """By which what the pod has shown has faded since this was said last."""
        before, self._asked_at = self._asked_at, now
        lessons, self._lessons = self._lessons, self._fleet.lessons
        if self.is_news or before is None:
            self.is_news, self._age, self._missed = False, 0.0, 0.0
        elif lessons != self._lessons:
            self._age += now - before
            if self._age > QUIET_SECONDS:
                self._missed += now - before
        if self._missed < TURN_SECONDS:
            return 0.0
        missed, self._missed = self._missed, 0.0
        return missed
