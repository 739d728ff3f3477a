"""Several legs on the way to one client, until it is clear which of them answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from proxy.core.attempt import Attempt, Ending
from proxy.http.answer import Answer, Rim
from proxy.http.call import HttpCall

if TYPE_CHECKING:
    from proxy.http.client import Sink
    from proxy.http.relay import ClientRelay


class Race:
    """Implements `core.ports.Race`. Stands for all legs before the client's connection.

    An answer says so before it writes the first byte to the client: in that moment the others are ended, so that none
    of them writes any.
    """

    def __init__(self, relay: ClientRelay, call: HttpCall, rim: Rim, begins: Callable[[Attempt], None]) -> None:
        self.call = call
        self.winner: Attempt | None = None
        self._relay = relay
        self._rim = replace(rim, takes=self._takes)
        self._takes_alone = rim.takes
        self._begins = begins
        self._lanes: list[Lane] = []

    def __enter__(self) -> None:
        self.call.connection.sink = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.call.connection.sink is self:
            self.call.connection.sink = None

    async def relay(self, attempt: Attempt) -> None:
        """See the port."""
        self._relay.attempt = self._relay.attempt or attempt
        lane = Lane(self, attempt)
        self._lanes.append(lane)
        try:
            await self._relay.send(attempt, self._rim, lane)
        finally:
            self._lanes.remove(lane)

    def begins(self, lane: Lane) -> None:
        self.winner = self._relay.attempt = lane.attempt
        self._begins(lane.attempt)
        for other in tuple(self._lanes):
            if other is not lane:
                other.give_up()

    # what the client's connection calls

    def pause(self) -> None:
        for sink in self._sinks():
            sink.pause()

    def resume(self) -> None:
        for sink in self._sinks():
            sink.resume()

    def gone(self) -> None:
        for sink in self._sinks():
            sink.gone()

    def check(self, now: float) -> None:
        for sink in self._sinks():
            sink.check(now)

    # what the server calls

    def evict(self) -> None:
        for sink in self._sinks():
            if isinstance(sink, Answer):
                sink.evict()

    def _sinks(self) -> list[Sink]:
        return [lane.sink for lane in self._lanes if lane.sink is not None]

    def _takes(self, attempt: Attempt, status: int) -> bool:
        """While another leg may answer, a refusal is not for the client."""
        return len(self._lanes) > 1 or self._takes_alone(attempt, status)


class Lane:
    """The client's connection as one of several attempts has it."""

    __slots__ = ("_connection", "_race", "_task", "attempt", "sink")

    def __init__(self, race: Race, attempt: Attempt) -> None:
        self.attempt = attempt
        self.sink: Sink | None = None
        self._race = race
        self._connection = race.call.connection
        self._task = asyncio.current_task()

    @property
    def writing_paused(self) -> bool:
        return self._connection.writing_paused

    def begins(self) -> None:
        """This attempt answers, and no other."""
        self._race.begins(self)

    def give_up(self) -> None:
        """Another attempt answers."""
        if isinstance(self.sink, Answer):
            self.sink.abandon()
        elif self._task is not None:
            self.attempt.ending = Ending.EVICTED
            self._task.cancel()
