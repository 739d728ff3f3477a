"""Reads of the pods' models that workers ask for: the supervisor reads, and says when a round is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from proxy.core.endpoint import Endpoint
from proxy.fleet.models import ModelReads


class WorkerModelReads(ModelReads):
    """A worker's side."""

    def __init__(self, ask_for_round: Callable[[int], None], ask_for_pod: Callable[[str], None]) -> None:
        """`ask_for_round` is given a number, which comes back when the round is over."""
        self._ask_for_round = ask_for_round
        self._ask_for_pod = ask_for_pod
        self._number = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """In the order of their numbers."""

    def next_round(self) -> asyncio.Future[None]:
        """Every request has a number of its own: only the supervisor knows which round had begun when it asked."""
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._ask_for_round(self._number)
        return future

    def read_soon(self, endpoint: Endpoint) -> None:
        self._ask_for_pod(endpoint.name)

    def over(self, number: int) -> None:
        """The round is over for all requests up to this number."""
        for waiting in [waiting for waiting in self._waiting if waiting <= number]:
            self._waiting.pop(waiting).set_result(None)


class RoundsForWorkers:
    """The supervisor's side."""

    def __init__(self, reads: ModelReads, tell: Callable[[Mapping[int, int]], None]) -> None:
        """`tell` says to all workers up to which number, by worker, a round is over."""
        self._reads = reads
        self._tell = tell
        self._asked: dict[asyncio.Future[None], dict[int, int]] = {}
        """The last number of each worker, by the round that it waits for."""

    def ask(self, worker: int, number: int) -> None:
        over = self._reads.next_round()
        if over not in self._asked:
            self._asked[over] = {}
            over.add_done_callback(self._over)
        self._asked[over][worker] = number

    def _over(self, over: asyncio.Future[None]) -> None:
        """What the round has found was told before."""
        self._tell(self._asked.pop(over))
