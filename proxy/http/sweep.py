"""One periodic look at everything that may stall, in place of a timer for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from proxy.core.ports import Clock

log = logging.getLogger(__name__)


class Watched(Protocol):
    def check(self, now: float) -> None:
        """Ends what has stalled. `now` is monotonic seconds."""


class Sweep:
    """`watched` is added to and discarded from by whoever waits."""

    def __init__(self, clock: Clock, shortest: float) -> None:
        """`shortest` is the shortest timeout that is watched, in seconds: it is overrun by a quarter at most, or by a
        second."""
        self.watched: set[Watched] = set()
        self._clock = clock
        self.change(shortest)

    def change(self, shortest: float) -> None:
        self.interval = min(1.0, max(0.02, shortest / 4))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.interval)
            self.look()

    def look(self) -> None:
        look_at(self.watched, self._clock.now())


def look_at(watched: Iterable[Watched], now: float) -> None:
    """Whoever cannot be checked spares nobody else."""
    for each in tuple(watched):
        try:
            each.check(now)
        except Exception:
            log.exception("%r could not be checked", each)
