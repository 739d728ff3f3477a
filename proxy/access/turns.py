"""Who among several may let a request in now, while what the others let in is on its way to be known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import final

NEWS = 0.02
"""Seconds after which all workers of a host know what one of them has let in."""

LONGEST = 0.5
"""Seconds that a request waits for its turn among many proxies; then it has what is known to be left."""

MANY = 1000
"""Limits, after which those are forgotten that nobody asked for of late."""

Limit = tuple[str, str, str]
"""Kind and name of whose it is, and of what."""

Sleep = Callable[[float], Awaitable[None]]


@final
class Turns:
    """Time is cut into rounds, the same for all workers. In each, a worker lets in its part of what was left when it
    looked first, and those that are over go to whose turn it is: so all together let in no more than there is. The
    first half of a round is for the news of the one before: whoever has any, or has made some, looks when it is over.
    """

    patience = math.inf

    def __init__(self, workers: int, seat: int, sleep: Sleep = asyncio.sleep) -> None:
        self.sleep = sleep
        self._workers = workers
        self._seat = seat
        self._round = -1
        self._parts: dict[Limit, int] = {}
        """What may still be let in of each limit in this round."""

    def pause(self, limit: Limit, left: int, now: float, changed_at: float) -> float:
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


@final
class Parts:
    """Among the processes of several hosts, which have no clock in common. Each lets in its part of what it knows to be
    left, one at least, and looks again when it must have heard of the others' parts. So of a burst all together let
    in what there is, and where there is less than a request for each, one each. What comes back meanwhile, as a request
    that has ended does, may be let in again.
    """

    patience = LONGEST

    def __init__(self, processes: int, news: float, sleep: Sleep = asyncio.sleep) -> None:
        """`news`: seconds after which the others know, over a store that is well."""
        self.sleep = sleep
        self.processes = processes
        self._news = news
        self._parts: dict[Limit, tuple[float, int]] = {}
        """Until when it is the part, and what has to be left beside it."""

    def pause(self, limit: Limit, left: int, now: float, changed_at: float) -> float:
        """As that of `Turns`."""
        until, floor = self._parts.get(limit, (now, 0))
        if now >= until:
            self._forget_old(now)
            until, floor = now + self._news, left - max(1, left // self.processes)
            self._parts[limit] = until, floor
        return 0.0 if left > floor else until - now

    def _forget_old(self, now: float) -> None:
        if len(self._parts) >= MANY:
            self._parts = {limit: part for limit, part in self._parts.items() if part[0] > now}
