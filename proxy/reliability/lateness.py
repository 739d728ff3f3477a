"""After how long an answer that has not begun is late."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from proxy.core.request import InferenceRequest
from proxy.reliability.settings import HedgingSettings

REMEMBERED = 500
"""First bytes by which the next are judged."""

ENOUGH = 50
"""Of them, before anything is late."""

EVERY = 25
"""So many make a new judgement."""

KINDS = 200
"""Of requests that are told apart; clients may make up models."""


class Times:
    """Seconds to the first byte of requests of one kind."""

    __slots__ = ("_news", "_seen", "late")

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._news = 0
        self.late: float | None = None
        """None while too few are known."""

    def add(self, seconds: float, share: float) -> None:
        self._seen.append(seconds)
        self._news += 1
        if len(self._seen) >= ENOUGH and self._news >= EVERY:
            self._news = 0
            ordered = sorted(self._seen)
            self.late = ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Lateness:
    """Streams and whole answers are judged apart, and so are models: a whole one begins when all of it is there."""

    def __init__(self, settings: HedgingSettings) -> None:
        self._kinds: dict[Hashable, Times] = {}
        self.settings = settings

    def of(self, request: InferenceRequest) -> float | None:
        """Seconds from when it is sent; None if nobody knows."""
        if self.settings.after is not None:
            return self.settings.after
        times = self._kinds.get((request.model, request.stream))
        return None if times is None else times.late

    def saw(self, request: InferenceRequest, seconds: float) -> None:
        """The first byte came, or was not waited for any longer."""
        if self.settings.after is not None:
            return
        kind = (request.model, request.stream)
        times = self._kinds.get(kind)
        if times is None and len(self._kinds) < KINDS:
            times = self._kinds[kind] = Times()
        if times is not None:
            times.add(seconds, self.settings.percentile / 100)
