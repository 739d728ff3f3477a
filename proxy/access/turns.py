"""Who among several workers may let a request in now, while what the others let in is on its way to be known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import final

NEWS = 0.02
"""Seconds after which all workers of a host know what one of them has let in."""

Sleep = Callable[[float], Awaitable[None]]


@final
class Turns:
    """Time is cut into rounds, the same for all workers. In each, a worker lets in its part of what was left when it
    looked first, and those that are over go to whose turn it is: so all together let in no more than there is. The
    first half of a round is for the news of the one before: whoever has any, or has made some, looks when it is over.
    """

    def __init__(self, workers: int, seat: int, sleep: Sleep = asyncio.sleep) -> None:
        self.sleep = sleep
        self._workers = workers
        self._seat = seat
        self._round = -1
        self._parts: dict[tuple[str, str, str], int] = {}
        """What may still be let in of each limit in this round."""

    def pause(self, limit: tuple[str, str, str], left: int, now: float, changed_at: float) -> float:
        """Seconds until it is worth asking again; 0 if the request may go on, and has taken one of the part. Somebody
        was let in at `changed_at`."""
        stretch = int(now / NEWS)
        number = (stretch + 1) // 2
        if number != self._round:
            self._round = number
            self._parts.clear()
        part = self._parts.get(limit)
        if part is None:
            if stretch % 2 and now - changed_at < NEWS:
                return (stretch + 1) * NEWS - now
            part = left // self._workers + ((number + self._seat) % self._workers < left % self._workers)
        self._parts[limit] = max(0, part - 1)
        return 0.0 if part else 2 * (number + 1) * NEWS - now
