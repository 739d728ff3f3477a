"""How often pods may be asked, so that all refreshes together stay under a share of one core."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from proxy.core.ports import Clock

T = TypeVar("T")

UNSEEN = 1.2
"""CPU of a refresh per second measured in the steps of its coroutine: reading the socket, parsing HTTP and turning the
loop happen outside of them. Measured with `bench/refresh.py`."""

_MEMORY = 20
"""Rounds over which the mean cost of a pod is taken."""

_SPIKE = 4.0
"""A round counts at most this many times the round before it. A pause of the whole process during one round must not
stretch a pod's interval to minutes."""

_FIRST = 0.002
"""CPU seconds that stand for the round before the first one of the process."""


class Budget:
    """The share of one core that all scrapes of a pool may take, divided equally among its pods."""

    def __init__(self, interval: float, max_core: float) -> None:
        self.shortest = interval
        self.max_core = max_core
        self.pods = 0
        self.rounds = 0
        """Number of rounds of all pods since the start."""
        self.charged = 0.0
        """CPU seconds of these rounds."""
        self.last = 0.0
        """CPU seconds of the latest round of any pod."""


class PodBudget:
    """One pod's part of the budget: with n pods, c CPU seconds per round of this pod and a share m of a core, the pod
    is scraped every n·c/m seconds, so it takes m/n of a core. Entered while the pod is scraped."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._last = 0.0
        self._rounds = 0
        self.cost = 0.0
        """Mean CPU seconds of a round."""

    def __enter__(self) -> None:
        self._budget.pods += 1

    def __exit__(self, *_: object) -> None:
        self._budget.pods -= 1

    @property
    def interval(self) -> float:
        """Seconds between two rounds."""
        return max(self._budget.shortest, self.affordable)

    @property
    def affordable(self) -> float:
        """Seconds between two rounds that the pod's part of the CPU allows, whatever the configured interval is."""
        return self._budget.pods * self.cost / self._budget.max_core

    def charge(self, seconds: float) -> None:
        """Add a round that took `seconds` in the steps of its coroutine."""
        seconds *= UNSEEN
        counted = min(seconds, _SPIKE * (self._last or self._budget.last or _FIRST))
        self._rounds += 1
        self.cost += (counted - self.cost) / min(self._rounds, _MEMORY)
        self._last = self._budget.last = seconds
        self._budget.rounds += 1
        self._budget.charged += seconds


@types.coroutine
def metered(work: Coroutine[Any, Any, T], clock: Clock, charge: Callable[[float], None]) -> Generator[Any, None, T]:
    """Awaits `work`, then charges the seconds in which it was running, not those in which it waited."""
    running, thrown = 0.0, None
    try:
        while True:
            began = clock.now()
            try:
                awaited = work.throw(thrown) if thrown else work.send(None)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            finally:
                running += clock.now() - began
            thrown = None
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - cancellation too is for the work to see
                thrown = error
    finally:
        charge(running)
