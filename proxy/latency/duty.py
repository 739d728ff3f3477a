"""What share of its time a pod has spent on prompts of late: answers that run there go on that much slower."""

from __future__ import annotations

from math import exp, expm1

from proxy.core.endpoint import Endpoint

MEMORY = 10.0
"""Seconds in which what was is forgotten, but for a third."""

SHORTEST = 1.0
"""Seconds of which a share is taken, until so many were seen: of less, one prompt would be all."""

MOST = 0.9
"""Whoever computes prompts all the time still has answers go on."""


class Duty:
    """Of all pods. Lives as long as its plugin."""

    def __init__(self) -> None:
        self._worked: dict[Endpoint, tuple[float, float]] = {}
        """Until when it was counted, and the seconds until then, those long ago for less."""
        self._since: dict[Endpoint, float] = {}
        """When it was first asked for, or counted: what was before nobody knows, and it counts for nothing."""

    def add(self, endpoint: Endpoint, seconds: float, now: float) -> None:
        """A prompt that we have sent. Of those that siblings send we see how many there are, and they are like ours."""
        self._since.setdefault(endpoint, now)
        load = endpoint.load
        ours = max(1, load.requests - load.remote_requests)
        self._worked[endpoint] = now, self._left(endpoint, now) + seconds * max(1.0, load.requests / ours)

    def of(self, endpoint: Endpoint, now: float) -> float:
        """From 0 to `MOST`."""
        seen = max(SHORTEST, now - self._since.setdefault(endpoint, now))
        return min(MOST, self._left(endpoint, now) / (MEMORY * -expm1(-seen / MEMORY)))

    def forget(self, endpoint: Endpoint) -> None:
        self._worked.pop(endpoint, None)
        self._since.pop(endpoint, None)

    def _left(self, endpoint: Endpoint, now: float) -> float:
        at, seconds = self._worked.get(endpoint, (now, 0.0))
        return seconds * exp((at - now) / MEMORY)
