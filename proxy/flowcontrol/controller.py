"""Admission: requests go on while the pods have capacity, and the others wait in the queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from math import exp
from types import TracebackType
from typing import Protocol, final

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.errors import Evicted, MadeRoom, QueueFull, Reason, TooLate, WaitedTooLong
from proxy.core.ports import Clock, Gate, Random
from proxy.core.request import DataKey, InferenceRequest
from proxy.flowcontrol.capacity import Fleet, Room, Siblings
from proxy.flowcontrol.queue import Queue, Waiting, objective, tokens_of
from proxy.flowcontrol.settings import FlowControlSettings, ShedByLoad, Shedding
from proxy.latency.forecast import LATENCY, objectives
from proxy.telemetry.metrics import Catalogue

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


@final
class Passage:
    """One request's, from its arrival at the gate to its end."""

    __slots__ = ("_control", "_task", "endpoint", "is_evicted", "legs", "request", "turn", "waiting")

    def __init__(self, control: FlowControl, request: InferenceRequest) -> None:
        self._control = control
        self.request = request
        self.is_evicted = False
        self.waiting: Waiting
        self.turn: asyncio.Future[QueueFull | None]
        """Comes when it goes on, or with why it does not."""
        self.endpoint: Endpoint | None = None
        self.legs: tuple[Attempt, ...] = ()
        """Those that answer, where what they take is counted."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self.turn = asyncio.get_running_loop().create_future()
        await self._control.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.leave(self)
        if self.is_evicted and isinstance(error, asyncio.CancelledError) and self._was_not_abandoned():
            evicted = Evicted("The request made room for a more urgent one.")
            raise self._control.refusal(self.waiting, evicted) from None

    def end_waiting(self, refusal: QueueFull | None) -> None:
        if self.turn.done():
            return
        if refusal is None:
            self._control.let_go_on(self)
        self.turn.set_result(refusal)

    def evict(self) -> None:
        self.is_evicted = True
        if self._task is not None:
            self._task.cancel()

    def _was_not_abandoned(self) -> bool:
        """By its client too, at the same time."""
        return self._task is not None and self._task.uncancel() == 0


PASSAGE: DataKey[Passage] = DataKey("FlowControlPassage")
"""Of the gate that it is at; there is one in a pool."""


EVICTION_PAUSE = 1.0
"""Seconds until pods report what an eviction has changed."""


class Eviction:
    """`inside` are the requests that have gone on, in that order."""

    def __init__(self, settings: FlowControlSettings, fleet: Fleet, clock: Clock, inside: dict[Passage, None]) -> None:
        self.settings = settings
        self._fleet = fleet
        self._clock = clock
        self._inside = inside
        self._begins_at = -math.inf

    def make_room_for(self, waiting: Waiting, anywhere: bool) -> None:
        """Ends the least urgent request that may be ended for it, of these the one that went on last. Another follows
        when it has left and that was not enough."""
        if not self.settings.evict_sheddable or self._clock.now() < self._begins_at:
            return
        if any(passage.is_evicted for passage in self._inside):
            return
        pods = self._fleet.serving(waiting.request.model)
        sheddable = [
            one
            for one in reversed(self._inside)
            if one.request.priority < min(0, waiting.band.priority) and (anywhere or one.endpoint in pods)
        ]
        if sheddable:
            if self.settings.saturation.detector == "utilization":
                self._begins_at = self._clock.now() + EVICTION_PAUSE
            min(sheddable, key=lambda passage: passage.request.priority).evict()


MEMORY = 10.0
"""Seconds in which the past shrinks to 1/e."""

LEAST_KNOWN = 5.0
"""Endings that have to be remembered before anything is predicted."""


class DrainRate:
    """Endings per second, of late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0.0
        self._at = clock.now()
        self._began = clock.now()

    def ended(self) -> None:
        self._fade()
        self._count += 1.0

    def wait(self, ahead: int) -> float | None:
        """Seconds until so many have gone on and one more; None while too little is known."""
        self._fade()
        if self._count < LEAST_KNOWN:
            return None
        known = MEMORY * (1.0 - exp((self._began - self._at) / MEMORY))
        return (ahead + 1) * known / self._count

    def _fade(self) -> None:
        now = self._clock.now()
        self._count *= exp((self._at - now) / MEMORY)
        self._at = now


COLD = 0.02
"""Used share of the KV cache below which a pod counts as having nothing to do."""


class SheddingGate(Gate):
    """Decides on the pods that the request could have, when all that is predicted of it is there."""

    def __init__(self, settings: Shedding, random: Random, watcher: Watcher) -> None:
        self._settings = settings
        self._random = random
        self._watcher = watcher

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """All. Raises QueueFull."""
        if request.priority < 0:
            by_load = self._settings.by_load
            if by_load is not None and self._random.random() < chance(by_load, endpoints):
                raise self._refusal(request, "The pods are too busy for what may be dropped.")
            if self._settings.missed_objectives and would_miss(request, endpoints):
                raise self._refusal(request, "No pod would answer in the time that is asked for.")
        return endpoints

    def spares(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        """What may be dropped is not sent twice."""
        return request.priority >= 0

    def _refusal(self, request: InferenceRequest, message: str) -> QueueFull:
        self._watcher.refused(str(request.priority), Reason.SATURATED)
        return QueueFull(message, reason=Reason.SATURATED)


def chance(by_load: ShedByLoad, endpoints: Sequence[Endpoint]) -> float:
    """k * saturation ^ power, at most 1, where saturation is the mean of the larger of queue and KV usage by theirs."""
    full = [_fullness(by_load, endpoint) for endpoint in endpoints]
    saturation = sum(full) / len(full)
    return min(1.0, by_load.k * math.pow(saturation, by_load.power))


def would_miss(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> bool:
    """Where something is predicted, and no pod has nothing to do."""
    asked, forecast = objectives(request), request.state.read(LATENCY)
    if asked is None or forecast is None:
        return False
    if any(endpoint.load.requests == 0 or endpoint.view.kv_usage < COLD for endpoint in endpoints):
        return False
    return not any(min(headrooms) >= 0.0 for headrooms in asked.headrooms(forecast, endpoints))


def _fullness(by_load: ShedByLoad, endpoint: Endpoint) -> float:
    if endpoint.metrics.freshness is Freshness.STALE:
        return 1.0
    view = endpoint.view
    return max(view.waiting / by_load.queue_depth, view.kv_usage / by_load.kv_usage)


class FlowSeries:
    """A Watcher of the gate of a pool."""

    def __init__(self, catalogue: Catalogue, pool: str) -> None:
        self._catalogue = catalogue
        self._pool = pool

    def went_on(self, band: str, waited: float) -> None:
        self._catalogue.queue_wait.cell(self._pool, band).observe(waited)

    def refused(self, band: str, reason: Reason) -> None:
        self._catalogue.queue_refused.cell(self._pool, band, reason.value).add()

    def read(self, queue: Queue, room: Room) -> None:
        """For an exposition."""
        for band in queue.bands:
            self._catalogue.queue_length.cell(self._pool, band.name).value = band.waiting
            self._catalogue.queue_bytes.cell(self._pool, band.name).value = band.bytes
        self._catalogue.saturation.cell(self._pool).value = room.saturation()

    def end(self) -> None:
        """There is no such gate any more. What others show is read anew for every exposition."""
        for gauge in (self._catalogue.queue_length, self._catalogue.queue_bytes, self._catalogue.saturation):
            gauge.clear()
