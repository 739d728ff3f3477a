"""One periodic look at everything that may stall, in place of a timer for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

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
        self.shortest = shortest

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(1.0, max(0.02, self.shortest / 4))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.interval)
            self.look()

    def look(self) -> None:
        look_at(self.watched, self._clock.now())


W = TypeVar("W", bound=Watched)


def _log(watched: Watched, error: Exception) -> None:
    log.error("%r could not be checked", watched, exc_info=error)


def look_at(watched: Iterable[W], now: float, broke: Callable[[W, Exception], None] = _log) -> None:
    """Check each of them. `broke` is given one whose check failed, with the error; the others are checked all the
    same."""
    for each in tuple(watched):
        try:
            each.check(now)
        except Exception as error:  # noqa: BLE001  # logged by `broke`
            broke(each, error)
