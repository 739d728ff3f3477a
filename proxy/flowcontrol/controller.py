"""The gate before the pods: lets requests go on while there is room, and has the others wait in their order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import MadeRoom, QueueFull, Reason, TooLate, WaitedTooLong
from proxy.core.ports import Clock, Gate
from proxy.core.request import InferenceRequest
from proxy.flowcontrol.band import Waiting, objective
from proxy.flowcontrol.drain import DrainRate
from proxy.flowcontrol.eviction import Eviction
from proxy.flowcontrol.passage import PASSAGE, Passage
from proxy.flowcontrol.queue import Queue
from proxy.flowcontrol.room import Fleet, Room
from proxy.flowcontrol.service import tokens_of
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.flowcontrol.siblings import Siblings

LONGEST_RETRY_AFTER = 60.0
"""Seconds."""


class Watcher(Protocol):
    """Who counts; bands go by their names, times are in seconds."""

    def went_on(self, band: str, waited: float) -> None: ...

    def refused(self, band: str, reason: Reason) -> None:
        """Or ended, where the reason says so."""

    def end(self) -> None:
        """Nothing waits here any more."""


class FlowControl(Gate):
    """Nothing is polled: whoever wants to go on looks for room when it comes, when another leaves, and whenever `look`
    is called, because the pods have changed.

    The highest band goes first; where the pods of one model are full, those behind it that want another one pass. Where
    all pods together are full nobody passes.
    """

    def __init__(self, settings: FlowControlSettings, fleet: Fleet, clock: Clock, watcher: Watcher) -> None:
        self._settings = settings
        self._fleet = fleet
        self._clock = clock
        self._watcher = watcher
        self.queue = Queue(settings)
        self._rate = DrainRate(clock)
        self._inside: dict[Passage, None] = {}
        """In the order in which they went on."""
        self._unsent: dict[Passage, Waiting] = {}
        """Those of them that are on no pod."""
        self.room = Room(settings, fleet, self._inside, self._unsent.values())
        self._eviction = Eviction(settings, fleet, clock, self._inside)
        self._looks_soon = False
        self.siblings: Siblings | None = None
        """Where there are several workers."""

    @property
    def settings(self) -> FlowControlSettings:
        """Where they change, waiting requests keep waiting, for as long as before, unless there is room now."""
        return self._settings

    @settings.setter
    def settings(self, settings: FlowControlSettings) -> None:
        self._settings = self.queue.settings = self.room.settings = self._eviction.settings = settings
        self.look()

    async def __aenter__(self) -> FlowControl:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let all waiting requests go on: their pool is gone, or the process ends."""
        self.settings = FlowControlSettings()
        self._watcher.end()

    def admit(self, request: InferenceRequest) -> Passage:
        """A context manager around all that is done for the request. Entering it raises QueueFull."""
        return Passage(self, request)

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """The pods that have room for it. Until it is sent it counts as one that needs room on any."""
        passage = request.state.read(PASSAGE)
        if passage is not None and passage in self._inside:
            self._unsent[passage] = passage.waiting
            if self.siblings is not None:
                endpoints = self.room.on_in_part(endpoints, passage.waiting.cost, self.siblings.part)
        return self.room.on(endpoints, max(1, request.prompt.tokens))

    def attempt_started(self, attempt: Attempt) -> None:
        """Take what the attempt that answers costs, which is known once its pod is chosen."""
        passage = attempt.request.state.read(PASSAGE)
        if passage is not None and attempt.charge is not None and attempt.answers:
            self._unsent.pop(passage, None)
            passage.endpoint = attempt.endpoint
            passage.waiting.recount(attempt.charge[0])
            if self.queue.counts_service:
                passage.legs = (*passage.legs, attempt)

    def first_byte(self, attempt: Attempt) -> None:
        """Let waiting requests go on: the prompt of this one is no longer in flight."""
        self.look()

    def spares(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        passage = request.state.read(PASSAGE)
        if passage is None or self.queue.waiting or not self.room.in_all(passage.waiting):
            return False
        return self.room.fits(endpoint, passage.waiting.cost)

    def look(self) -> None:
        """Lets go on whoever can, unless siblings should."""
        siblings = self.siblings
        if siblings is None:
            self._look()
            return
        if siblings.wait and self._siblings_go_first(siblings):
            self._lend(siblings, all_of_it=True)
        self._look()
        if siblings.wait:
            self._lend(siblings, all_of_it=False)
        siblings.say(self._highest(), self._wants(siblings))

    def _look(self) -> None:
        full: set[str] = set()
        self.room.turn()
        for band in self.queue.bands:
            while band.waiting and (waiting := band.due(full)) is not None:
                if not self.room.in_all(waiting):
                    self._eviction.make_room_for(waiting, anywhere=True)
                    return
                if not self.room.on_a_pod(waiting):
                    full.add(waiting.request.model)
                    self._eviction.make_room_for(waiting, anywhere=False)
                elif not self._in_part(waiting):
                    full.add(waiting.request.model)
                else:
                    band.take(waiting)
                    waiting.leave(None)
                    self.room.turn()

    async def enter(self, passage: Passage) -> None:
        request = passage.request
        request.state.write(PASSAGE, passage)
        band = self.queue.band(request.priority)
        waiting = passage.waiting = Waiting(request, band, self._clock.now(), passage.end_waiting)
        if self._passes(waiting):
            self.let_go_on(passage)
            self._watcher.went_on(band.name, 0.0)
            return
        self._find_place(waiting)
        band.push(waiting)
        if self.siblings is not None:
            self.look()
        self._eviction.make_room_for(waiting, anywhere=not self.room.in_all(waiting))
        try:
            await self._wait(passage)
        except BaseException:
            waiting.band.drop(waiting)
            self.leave(passage)
            raise
        self._watcher.went_on(band.name, self._clock.now() - waiting.since)

    def let_go_on(self, passage: Passage) -> None:
        self._inside[passage] = None
        self._unsent[passage] = passage.waiting

    def leave(self, passage: Passage) -> None:
        """However it ended."""
        if passage in self._inside:
            del self._inside[passage]
            self._unsent.pop(passage, None)
            self._rate.ended()
            if passage.legs:
                self.queue.attained.add(passage.request.tenant, tokens_of(passage.legs), self._clock.now())
            self.look()
        else:
            self._look_soon()

    def _look_soon(self) -> None:
        """Look once in the next turn of the event loop, however many waiting requests leave in this one: the first of
        them may have kept others from going on."""
        if not self._looks_soon:
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._look_now)

    def _look_now(self) -> None:
        self._looks_soon = False
        self.look()

    def refusal(self, waiting: Waiting, refusal: QueueFull) -> QueueFull:
        """Counted, and with the time to come again."""
        self._watcher.refused(waiting.band.name, refusal.reason)
        wait = self._rate.wait(self.queue.ahead(waiting))
        refusal.retry_after = 1.0 if wait is None else min(LONGEST_RETRY_AFTER, max(1.0, wait))
        return refusal

    def _passes(self, waiting: Waiting) -> bool:
        """Whether it need not wait. A small prompt does not overtake large ones that wait for room in all pods."""
        model, alone = waiting.request.model, self._settings.max_tokens is not None
        for band in self.queue.bands:
            if band.priority < waiting.band.priority:
                break
            if band.waiting and (alone or model in band.models):
                return False
        if self.siblings is not None and (
            self.siblings.go_first(waiting.band.priority, *self._parts()) or not self._in_part(waiting)
        ):
            return False
        self.room.turn()
        return self.room.in_all(waiting) and self.room.on_a_pod(waiting)

    def _in_part(self, waiting: Waiting) -> bool:
        return self.siblings is None or self.room.in_part(waiting, self.siblings.part)

    def _siblings_go_first(self, siblings: Siblings) -> bool:
        highest = self._highest()
        return highest is None or siblings.go_first(highest, *self._parts())

    def _lend(self, siblings: Siblings, all_of_it: bool) -> None:
        """What is not in use; or half of it, where somebody waits here too, for more than there is."""
        for cap, idle, wants in list(self.room.idle(siblings.part, siblings.wanted)):
            if idle > 0:
                siblings.lend(cap, idle if all_of_it else -(-idle // 2), wants)

    def _wants(self, siblings: Siblings) -> Sequence[str]:
        """Of what others have: only what is asked for is given, or two that wait for other pods would give each other
        the same again and again."""
        models = {model for band in self.queue.bands for model in band.models}
        return (*sorted(models), *self.room.short(siblings.part)) if models else ()

    def _highest(self) -> int | None:
        """Of the priorities that wait."""
        return next((band.priority for band in self.queue.bands if band.waiting), None)

    def _parts(self) -> tuple[int, int]:
        """Requests in flight: of this worker, and of all."""
        elsewhere = sum(endpoint.load.remote_requests for endpoint in self._fleet.ready)
        return len(self._inside), len(self._inside) + elsewhere

    def _find_place(self, waiting: Waiting) -> None:
        """In the queue. Raises QueueFull if there is none, or if it would wait in vain."""
        request, band, queue = waiting.request, waiting.band, self.queue
        wait = self._rate.wait(queue.ahead(waiting))
        if wait is not None and self._clock.now() + wait > self._needed_by(waiting):
            raise self.refusal(waiting, TooLate("No pod will have room in the time that the request has."))
        fits = len(request.body) <= self._settings.max_queued_bytes
        while band.is_full_for(request) or queue.is_full_for(waiting):
            last = band.gives_way(waiting) if band.is_full_for(request) else queue.gives_way(waiting)
            if last is None or not fits:
                raise self.refusal(waiting, QueueFull("Too many requests wait for a pod."))
            last.band.drop(last)
            last.leave(self.refusal(last, MadeRoom("The request made room for another one that waits.")))

    async def _wait(self, passage: Passage) -> None:
        """Raises QueueFull, and TimeoutError never."""
        waiting, now = passage.waiting, self._clock.now()
        expires, needed = waiting.since + waiting.band.timeout, self._needed_by(waiting)
        seconds = min(expires, needed) - now
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                refusal = await passage.turn
        except TimeoutError:
            if passage in self._inside:
                return
            kind = WaitedTooLong if expires <= needed else TooLate
            raise self.refusal(waiting, kind("The request waited too long for a pod.")) from None
        if refusal is not None:
            raise refusal

    def _needed_by(self, waiting: Waiting) -> float:
        request = waiting.request
        if waiting.band.ordering == "slo-deadline":
            return min(request.deadline, request.received_at + objective(request))
        return request.deadline
