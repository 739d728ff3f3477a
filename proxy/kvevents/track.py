"""One source of KV events: which message comes next, what to do if it does not, and whether all is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from proxy.core.endpoint import GONE, Endpoint
from proxy.core.kv import AllCleared
from proxy.core.ports import KvListener
from proxy.kvevents import wire
from proxy.kvevents.wire import Batch, Garbled

log = logging.getLogger(__name__)

Answers = AsyncGenerator[tuple[int, bytes], None]

Replay = Callable[[int], Answers]
"""From a sequence number on: what the engine still has, in order. Raises NoReplay if it cannot be asked."""


LOST = "pod %s: %d batches of KV events are lost; what it holds is forgotten"


class NoReplay(Exception):
    """Nobody answers, or not to the end."""


class Track:
    """Lives as long as its rank of its pod. An engine counts its messages from 0 on, so one that has missed none knows
    all that it holds. A lower number than expected, of a later time, is a restart; of an earlier one, it was replayed.

    `whole` says that nothing was missed; `heard` that the engine is there and is the one that said so.
    """

    def __init__(self, endpoint: Endpoint, rank: int, listener: KvListener, replay: Replay | None) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._listener = listener
        self._replay = replay
        self._next = 0
        self._at = 0.0
        self._told: bool | None = None
        self.whole = True
        self.heard = False

    async def connected(self) -> None:
        """To an engine, maybe another one than before: it is asked for the message that came last, and those since."""
        if self._replay is None:
            return
        try:
            if self._next and not await self._is_the_same():
                self._restarted()
            await self._catch_up()
        except NoReplay:
            return
        self.heard = True
        self._tell()

    def disconnected(self) -> None:
        self.heard = False
        self._tell()

    async def arrived(self, number: int, payload: bytes) -> None:
        """A message; whatever it is, the next one is taken too."""
        try:
            batch = wire.batch(payload)
        except Garbled as error:
            log.warning("pod %s published what is no batch of KV events: %s", self._endpoint.name, error)
            return
        if number < self._next and batch.at > self._at:
            self._restarted()
        if number < self._next:
            return
        if number > self._next:
            await self._fill()
        if number > self._next:
            self._lost(number)
        if number == self._next:
            await self._take(batch)
        self.heard = True
        self._tell()

    async def _fill(self) -> None:
        try:
            await self._catch_up()
        except NoReplay as error:
            log.debug("pod %s cannot be asked for KV events that were missed: %s", self._endpoint.name, error)

    async def _is_the_same(self) -> bool:
        last = self._next - 1
        async with aclosing(self._asked(last)) as answers:
            async for number, payload in answers:
                try:
                    return number > last or wire.batch(payload).at == self._at
                except Garbled:
                    return False
        return False

    async def _catch_up(self) -> None:
        async with aclosing(self._asked(self._next)) as answers:
            async for number, payload in answers:
                try:
                    batch = wire.batch(payload)
                except Garbled:
                    continue
                if number > self._next:
                    self._lost(number)
                if number == self._next:
                    await self._take(batch)

    def _asked(self, start: int) -> Answers:
        if self._replay is None:
            raise NoReplay("there is no replay socket")
        return self._replay(start)

    async def _take(self, batch: Batch) -> None:
        """Tell of the events, and let the event loop run in between."""
        self._next += 1
        self._at = batch.at
        unknown = 0
        for number, (events, odd) in enumerate(batch.steps()):
            if number:
                await asyncio.sleep(0)
                if self._endpoint.state is GONE:
                    return
            unknown += odd
            if any(isinstance(event, AllCleared) for event in events):
                self.whole = True
            self._listener.told(self._endpoint, self._rank, events)
        if unknown:
            log.debug("pod %s published %d KV events that are not understood", self._endpoint.name, unknown)

    def _restarted(self) -> None:
        log.info("pod %s: its KV cache begins anew", self._endpoint.name)
        self._listener.lost(self._endpoint, self._rank)
        self._next, self._at, self.whole = 0, 0.0, True
        self._told = None

    def _lost(self, number: int) -> None:
        log.warning(LOST, self._endpoint.name, number - self._next)
        self._listener.lost(self._endpoint, self._rank)
        self._next, self.whole = number, False
        self._told = None

    def _tell(self) -> None:
        known = self.whole and self.heard
        if known is not self._told:
            self._told = known
            self._listener.complete(self._endpoint, self._rank, known)
