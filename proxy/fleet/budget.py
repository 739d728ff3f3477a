"""How often pods may be asked, so that all refreshes together stay under a share of one core."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from proxy.core.ports import Clock

T = TypeVar("T")

UNSEEN = 1.2
"""CPU of a refresh per second measured in the steps of its coroutine: reading the socket, parsing HTTP and turning the
loop happen outside of them. Measured with `bench/refresh.py`."""

_MEMORY = 200
"""Rounds that the mean cost remembers."""


class Budget:
    """With n pods, c seconds of CPU a round and a share m of a core, all pods are asked every n·c/m seconds, or every
    `interval` seconds if that is longer: n rounds per n·c/m seconds take the share m."""

    def __init__(self, interval: float, max_core: float) -> None:
        self._shortest = interval
        self._max_core = max_core
        self._pods = 0
        self.rounds = 0
        self.cost = 0.0
        """Mean CPU seconds of a round."""

    def change(self, interval: float, max_core: float) -> None:
        self._shortest = interval
        self._max_core = max_core

    @property
    def interval(self) -> float:
        """Seconds between two rounds of one pod."""
        return max(self._shortest, self._pods * self.cost / self._max_core)

    @contextmanager
    def share(self) -> Iterator[None]:
        """One pod more, while it lasts."""
        self._pods += 1
        try:
            yield
        finally:
            self._pods -= 1

    def charge(self, seconds: float) -> None:
        """One round took `seconds` in the steps of its coroutine."""
        self.rounds += 1
        self.cost += (seconds * UNSEEN - self.cost) / min(self.rounds, _MEMORY)


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
