"""Reads of the pods' models that a request needs at once: of all pods for a model that no ready pod lists, of one pod
after its 404."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Declined
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks

NOT_FOUND = 404

ROUND_EVERY = 1.0
"""Seconds between two rounds, and between two reads of one pod: clients that invent models cause no more."""

LONGEST_WAIT = 2.0
"""Seconds that a request waits for a round, and a round for its pods."""


class ModelReads(Protocol):
    """How the gateway has the models of pods read."""

    def next_round(self) -> asyncio.Future[None]:
        """Have the models of all ready pods read. The future is done after a round that begins after this call."""

    def read_soon(self, endpoint: Endpoint) -> None:
        """Have the models of one pod read."""


class ReadsAfterNotFound(Listener):
    """Has the models of a pod read again after it responded with 404 to a request for a model."""

    def __init__(self, reads: ModelReads) -> None:
        self._reads = reads

    def attempt_failed(self, attempt: Attempt, error: BaseException | None) -> None:
        status = error.status if isinstance(error, Declined) else attempt.status
        if status == NOT_FOUND and attempt.request.model:
            self._reads.read_soon(attempt.endpoint)


class ModelRounds:
    """Rounds in which the models of all ready pods are read. Requests that come before a round begins share it."""

    def __init__(self, read: Callable[[], Iterable[asyncio.Future[None]]], clock: Clock, tasks: Tasks) -> None:
        """`read` begins a read of each pod, and returns what is done after each."""
        self._read = read
        self._clock = clock
        self._tasks = tasks
        self._next: asyncio.Future[None] | None = None
        self._not_before = 0.0

    def next(self) -> asyncio.Future[None]:
        """Return what is done after the next round that begins."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            self._tasks.start(self._read_all(self._next), "round of model reads")
        return self._next

    async def _read_all(self, over: asyncio.Future[None]) -> None:
        try:
            await asyncio.sleep(self._not_before - self._clock.now())
            self._next, self._not_before = None, self._clock.now() + ROUND_EVERY
            if reads := set(self._read()):
                await asyncio.wait(reads, timeout=LONGEST_WAIT)
        finally:
            if not over.done():
                over.set_result(None)
