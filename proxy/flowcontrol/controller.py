"""Admission: requests are admitted while the pods have capacity, and the others wait in the queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from math import exp
from types import TracebackType
from typing import final

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.errors import (
    DeadlineExceeded,
    Displaced,
    Evicted,
    FlowControlRefusal,
    NoPodInTime,
    QueueFull,
    Reason,
    Shed,
    WaitedTooLong,
)
from proxy.core.ports import Admission, Clock, Random
from proxy.core.request import InferenceRequest
from proxy.fleet.store import Pods
from proxy.flowcontrol import TICKET
from proxy.flowcontrol.capacity import REQUESTS, TOKENS, Capacity, SharedCaps
from proxy.flowcontrol.queue import Queue, QueueEntry, tokens_of, ttft_objective
from proxy.flowcontrol.settings import FlowControlSettings, ShedByLoad
from proxy.latency.forecast import LATENCY, objectives
from proxy.telemetry.metrics import Catalogue

LONGEST_RETRY_AFTER = 60.0
"""Seconds."""

EVICTION_PAUSE = 1.0
"""Seconds until pods report the effect of an eviction."""

WAITED_HEADER = "x-llm-d-flow-queue-duration-ms"
"""Response header with the time in the queue, in milliseconds."""

DISPLACED = "A more urgent request, or one of a tenant with fewer queued requests, took its place."


class FlowControl(Admission):
    """Admission of the requests of a pool. Nothing is polled: capacity is checked when a request arrives, when another
    ends, and whenever `admit_waiting` is called because the pods have changed.

    The highest band goes first. Where the pods of one model are full, requests for other models overtake; where all
    pods together are full, no request is admitted.
    """

    def __init__(self, settings: FlowControlSettings, fleet: Pods, clock: Clock, series: FlowSeries) -> None:
        self._settings = settings
        self._fleet = fleet
        self._clock = clock
        self._series = series
        self.queue = Queue(settings)
        self._rate = CompletionRate(clock)
        self._inside: dict[QueueTicket, None] = {}
        """Admitted requests, in the order of their admission."""
        self._unsent: dict[QueueTicket, QueueEntry] = {}
        """Admitted requests that are not sent to a pod yet."""
        self.capacity = Capacity(settings, fleet, self._inside, self._unsent.values(), clock)
        self._since = 0.0
        """Since when requests wait and none of them was admitted; 0 if none waits. See `_now`."""
        self._evicts_from = -math.inf
        """Time of the next eviction."""
        self._admits_soon = False
        self.shared_caps: SharedCaps | None = None
        """Set if there are several workers or replicas."""

    @property
    def settings(self) -> FlowControlSettings:
        """The settings. When they change, waiting requests keep waiting, unless there is capacity now."""
        return self._settings

    @settings.setter
    def settings(self, settings: FlowControlSettings) -> None:
        self._settings = self.queue.settings = self.capacity.settings = settings
        self.admit_waiting()

    async def __aenter__(self) -> FlowControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Admit all waiting requests: their pool is gone, or the process ends."""
        self.settings = FlowControlSettings()
        self._series.end()

    def read_gauges(self) -> None:
        """Update the gauges before an exposition."""
        self._series.read(self.queue, self.capacity)

    def admit(self, request: InferenceRequest) -> QueueTicket:
        """Return a context manager for the whole request. Entering it raises FlowControlRefusal."""
        return QueueTicket(self, request)

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Return the pods that have capacity for the request. Until it is sent it counts against all of them."""
        ticket = request.state.read(TICKET)
        if ticket is not None and ticket in self._inside:
            self._unsent[ticket] = ticket.entry
            if self.shared_caps is not None:
                endpoints = self.capacity.with_part(endpoints, ticket.entry.cost, self.shared_caps.part) or endpoints
        return self.capacity.on(endpoints, max(1, request.prompt.tokens))

    def attempt_started(self, attempt: Attempt) -> None:
        """Charge the cost of the attempt that responds, which is known once its pod is chosen."""
        ticket = attempt.request.state.read(TICKET)
        if ticket is None:
            return
        self._unsent.pop(ticket, None)
        if attempt.for_client:
            attempt.response_headers.append((WAITED_HEADER, str(int(ticket.waited * 1000))))
        if attempt.charge is not None and attempt.for_client:
            ticket.endpoint = attempt.endpoint
            if attempt.stage is not Stage.DECODE:  # its prompt is charged to a prefill pod
                ticket.entry.recount(attempt.charge[0])
            if self.queue.counts_service:
                ticket.attempts = (*ticket.attempts, attempt)

    def first_byte(self, attempt: Attempt) -> None:
        """Admit waiting requests: the prompt of this one is no longer in flight."""
        self.admit_waiting()

    def has_spare_capacity(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        ticket = request.state.read(TICKET)
        if ticket is None or self.queue.length or not self.capacity.in_all(ticket.entry):
            return False
        return self.capacity.fits(endpoint, ticket.entry.cost)

    def admit_waiting(self) -> None:
        """Admit waiting requests that have capacity now, unless peers go first."""
        shared_caps = self.shared_caps
        if shared_caps is None:
            self._admit_all()
            return
        highest = self._highest()
        if highest is not None and shared_caps.wait and shared_caps.go_first(highest, self._since, *self._in_flight()):
            for cap, idle, wants in self._idle(shared_caps):
                shared_caps.lend_to_first(cap, idle, wants)
        needs_pool = self._admit_all()
        highest, models = self._highest(), sorted({model for band in self.queue.bands for model in band.models})
        if highest is None:
            self._since = 0.0
        wanted = {*models, REQUESTS, TOKENS} if needs_pool else {*models}
        for cap, idle, wants in self._idle(shared_caps):
            if highest is not None and wants in wanted:
                shared_caps.lend_to_first(cap, idle, wants, before=(-highest, self._since, shared_caps.name))
            else:
                shared_caps.lend(cap, idle, wants)
        short = self.capacity.short(shared_caps.part) if needs_pool else ()
        shared_caps.say(highest, self._since, (*models, *short))

    def _admit_all(self) -> bool:
        """Return whether a request waits for a cap of the whole pool, or for a share of this process."""
        full: set[str] = set()
        needs_pool = False
        for band in self.queue.bands:
            while band.length and (entry := band.due(full)) is not None:
                if not self.capacity.in_all(entry):
                    self._evict_for(entry, anywhere=True)
                    return True
                if not self.capacity.on_a_pod(entry):
                    full.add(entry.request.model)
                    self._evict_for(entry, anywhere=False)
                elif not self._in_part(entry):
                    full.add(entry.request.model)
                    needs_pool = True
                else:
                    band.dequeue(entry)
                    entry.resolve(None)
                    self._since = self._now()
        return needs_pool

    async def enter(self, ticket: QueueTicket) -> None:
        request = ticket.request
        request.state.write(TICKET, ticket)
        band = self.queue.band(request.priority)
        entry = ticket.entry = QueueEntry(request, band, self._clock.now(), ticket.resolve)
        if self._passes(entry):
            self.admitted(ticket)
            self._series.admitted(band.name, 0.0)
            return
        self._find_place(entry)
        if not self.queue.length:
            self._since = self._now()
        band.push(entry)
        if self.shared_caps is not None:
            self.admit_waiting()
        self._evict_for(entry, anywhere=not self.capacity.in_all(entry))
        try:
            await self._wait(ticket)
        except BaseException:
            entry.band.drop(entry)
            self.end(ticket)
            raise
        ticket.waited = self._clock.now() - entry.since
        self._series.admitted(band.name, ticket.waited)

    def admitted(self, ticket: QueueTicket) -> None:
        """Count a request as in flight."""
        self._inside[ticket] = None
        self._unsent[ticket] = ticket.entry
        self.capacity.admitted()

    def end(self, ticket: QueueTicket) -> None:
        """End an admitted or waiting request."""
        if ticket in self._inside:
            del self._inside[ticket]
            self._unsent.pop(ticket, None)
            self._rate.ended()
            if ticket.attempts:
                self.queue.attained.add(ticket.request.tenant, tokens_of(ticket.attempts), self._clock.now())
            self.admit_waiting()
        else:
            self.admit_soon()

    def admit_soon(self) -> None:
        """Admit waiting requests in the next iteration of the event loop, once for all that leave the queue now: the
        first of them may have blocked others."""
        if not self._admits_soon:
            self._admits_soon = True
            asyncio.get_running_loop().call_soon(self._admit_now)

    def _admit_now(self) -> None:
        self._admits_soon = False
        self.admit_waiting()

    def refusal(self, entry: QueueEntry, refusal: FlowControlRefusal) -> FlowControlRefusal:
        """Count the refusal and set its Retry-After."""
        self._series.refused(entry.band.name, refusal.reason)
        wait = self._rate.wait(self.queue.ahead(entry))
        refusal.retry_after = 1.0 if wait is None else min(LONGEST_RETRY_AFTER, max(1.0, wait))
        return refusal

    def _passes(self, entry: QueueEntry) -> bool:
        """Return whether the request need not wait. A small prompt does not overtake large prompts that wait."""
        model, least = entry.request.model, entry.band.priority
        for band in self.queue.bands:
            if band.priority < least:
                break
            if model in band.models:
                return False
        if self._settings.max_tokens is not None and self._blocks_all_models(least):
            return False
        if self.shared_caps is not None and (
            self.shared_caps.go_first(entry.band.priority, self._now(), *self._in_flight()) or not self._in_part(entry)
        ):
            return False
        return self.capacity.in_all(entry) and self.capacity.on_a_pod(entry)

    def _blocks_all_models(self, least: int) -> bool:
        """Return whether a request of at least this priority waits for capacity of all pods together, or may be
        admitted now."""
        full: set[str] = set()
        for band in self.queue.bands:
            if band.priority < least:
                break
            while (entry := band.due(full)) is not None:
                if not self.capacity.in_all(entry) or (self.capacity.on_a_pod(entry) and self._in_part(entry)):
                    return True
                full.add(entry.request.model)
        return False

    def _in_part(self, entry: QueueEntry) -> bool:
        return self.shared_caps is None or self.capacity.in_part(entry, self.shared_caps.part)

    def _idle(self, shared_caps: SharedCaps) -> list[tuple[str, int, str]]:
        """Return unused parts of the shares that peers want: see `Capacity.idle`. Peers get only these; else two
        processes that wait for different pods would exchange the same shares again and again."""
        idle = self.capacity.idle(shared_caps.part, shared_caps.wanted) if shared_caps.wait else ()
        return [each for each in idle if each[1] > 0]

    def _now(self) -> float:
        """Return the time by which peers compare how long they wait: later than that of all peers that wait, even
        if the clocks of hosts differ, so that a process that has just admitted a request is the last."""
        return max(
            round(self._clock.wall(), 1), self.shared_caps.latest + 0.01 if self.shared_caps is not None else 0.0
        )

    def _highest(self) -> int | None:
        return next((band.priority for band in self.queue.bands if band.length), None)

    def _in_flight(self) -> tuple[int, int]:
        """Return the requests in flight of this process and of all."""
        elsewhere = sum(endpoint.load.remote_requests for endpoint in self._fleet.ready)
        return len(self._inside), len(self._inside) + elsewhere

    def _evict_for(self, entry: QueueEntry, anywhere: bool) -> None:
        """End the least urgent request that may be ended for this one; of equals the one admitted last. If that is not
        enough, another follows when it has ended."""
        if not self._settings.evict_sheddable or self._clock.now() < self._evicts_from or self.capacity.lacks_pods:
            return
        if any(ticket.is_evicted for ticket in self._inside):
            return
        pods = self._fleet.endpoints_for(entry.request.model)
        sheddable = [
            one
            for one in reversed(self._inside)
            if one.request.priority < min(0, entry.band.priority) and (anywhere or one.endpoint in pods)
        ]
        if sheddable:
            if self._settings.saturation.detector in ("utilization", "highest"):
                self._evicts_from = self._clock.now() + EVICTION_PAUSE
            min(sheddable, key=lambda ticket: ticket.request.priority).evict()

    def _find_place(self, entry: QueueEntry) -> None:
        """Make sure of a place in the queue. Raise QueueFull, or DeadlineExceeded if the request would wait in vain."""
        request, band, queue = entry.request, entry.band, self.queue
        wait = self._rate.wait(queue.ahead(entry))
        if wait is not None and self._clock.now() + wait > self._needed_by(entry):
            what = self._name_of(entry)
            raise self.refusal(entry, DeadlineExceeded(f"No pod will have capacity before the {what} of the request."))
        fits = len(request.body) <= min(self._settings.max_queued_bytes, band.most_bytes)
        while limit := band.reached_limit(request) or queue.reached_limit(entry):
            if not fits:
                is_of_band = band.most_bytes < self._settings.max_queued_bytes
                limit = f"maxQueuedBytes of the band `{band.name}`" if is_of_band else "flowControl.maxQueuedBytes"
                message = f"The pods are busy, and the body of the request is too large for the queue: {limit}."
                raise self.refusal(entry, QueueFull(message))
            last = band.victim_for(entry) if band.reached_limit(request) else queue.victim_for(entry)
            if last is None:
                raise self.refusal(entry, QueueFull(f"The queue is full: {limit} is reached."))
            last.band.drop(last)
            last.resolve(self.refusal(last, Displaced(DISPLACED)))

    async def _wait(self, ticket: QueueTicket) -> None:
        """Wait for admission. Raise FlowControlRefusal."""
        entry, now = ticket.entry, self._clock.now()
        longest = self._settings.no_endpoint_timeout if self.capacity.lacks_pods else None
        timeout = entry.band.timeout_of(entry.request, longest)
        expires, needed = entry.since + timeout, self._needed_by(entry)
        seconds = min(expires, needed) - now
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                refusal = await ticket.outcome
        except TimeoutError:
            if ticket in self._inside:
                return
            if expires <= needed and self.capacity.lacks_pods:
                late: FlowControlRefusal = NoPodInTime(f"No pod was ready within {timeout:g} s. Retry shortly.")
            elif expires <= needed:
                late = WaitedTooLong(f"No pod had capacity within {timeout:g} s.")
            else:
                late = DeadlineExceeded(f"No pod had capacity before the {self._name_of(entry)} of the request.")
            raise self.refusal(entry, late) from None
        if refusal is not None:
            raise refusal

    def _name_of(self, entry: QueueEntry) -> str:
        """Return what determines `_needed_by`."""
        return "deadline" if self._needed_by(entry) >= entry.request.deadline else "latency objective"

    def _needed_by(self, entry: QueueEntry) -> float:
        request = entry.request
        if entry.band.ordering == "slo-deadline":
            return min(request.deadline, request.received_at + ttft_objective(request))
        return request.deadline


@final
@dataclass(eq=False, slots=True)
class QueueTicket:
    """A request from its arrival at the queue to its end."""

    control: FlowControl
    request: InferenceRequest
    entry: QueueEntry = field(init=False)
    outcome: asyncio.Future[FlowControlRefusal | None] = field(init=False)
    """Resolves on admission with None, or with the refusal."""
    endpoint: Endpoint | None = field(init=False, default=None)
    waited: float = field(init=False, default=0.0)
    """Seconds in the queue."""
    attempts: tuple[Attempt, ...] = field(init=False, default=())
    """Attempts that respond, where service is counted."""
    is_evicted: bool = field(init=False, default=False)
    _task: asyncio.Task[None] | None = field(init=False, default=None)

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self.outcome = asyncio.get_running_loop().create_future()
        await self.control.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.control.end(self)
        if not self.is_evicted or not isinstance(error, asyncio.CancelledError) or self._task is None:
            return
        if self._task.uncancel() == 0:  # else the client cancelled at the same time
            evicted = Evicted("The request was ended for a more urgent one.")
            raise self.control.refusal(self.entry, evicted) from None

    def resolve(self, refusal: FlowControlRefusal | None) -> None:
        if self.outcome.done():
            return
        if refusal is None:
            self.control.admitted(self)
        self.outcome.set_result(refusal)

    def evict(self) -> None:
        self.is_evicted = True
        if self._task is not None:
            self._task.cancel()


MEMORY = 10.0
"""Seconds in which the weight of the past shrinks to 1/e."""

LEAST_KNOWN = 5.0
"""Remembered endings below which nothing is predicted."""


class CompletionRate:
    """Recent rate of requests that end, per second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0.0
        self._at = clock.now()
        self._began = clock.now()

    def ended(self) -> None:
        self._fade()
        self._count += 1.0

    def wait(self, ahead: int) -> float | None:
        """Return the seconds until `ahead` requests and one more are admitted; None while too little is known."""
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
"""Used share of the KV cache below which a pod counts as idle. With requests in flight, 0 means unknown."""


@dataclass(eq=False)
class LoadShedding(Admission):
    """Refuses requests of negative priority: by the load of the pods before they are queued, and by their latency
    objectives after the predictions for them have been made."""

    settings: FlowControlSettings
    pods: Pods
    random: Random
    series: FlowSeries

    def admit(self, request: InferenceRequest) -> AbstractAsyncContextManager[object]:
        by_load = self.settings.shedding.by_load
        if by_load is not None and request.priority < 0:
            endpoints = self.pods.endpoints_for(request.model)
            if endpoints and self.random.random() < chance(by_load, endpoints):
                raise self._refusal(request, "Requests of negative priority are shed: the pods are too busy.")
        return nullcontext()

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if request.priority < 0 and self.settings.shedding.missed_objectives and would_miss(request, endpoints):
            raise self._refusal(request, "The request is shed: no pod is predicted to meet its latency objectives.")
        return endpoints

    def has_spare_capacity(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        """Do not hedge requests of negative priority."""
        return request.priority >= 0

    def _refusal(self, request: InferenceRequest, message: str) -> Shed:
        shed = Shed(message)
        self.series.refused(self.settings.band_name(request.priority), shed.reason)
        return shed


def chance(by_load: ShedByLoad, endpoints: Sequence[Endpoint]) -> float:
    """Return min(1, k * saturation ^ power); saturation is the mean over pods of the larger of queue and KV usage."""
    full = [_fullness(by_load, endpoint) for endpoint in endpoints]
    saturation = sum(full) / len(full)
    try:
        return min(1.0, by_load.k * math.pow(saturation, by_load.power))
    except OverflowError:
        return 1.0


def would_miss(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> bool:
    """Return whether no pod is predicted to meet the latency objectives; False while a pod is idle."""
    wanted, forecast = objectives(request), request.state.read(LATENCY)
    if wanted is None or forecast is None:
        return False
    if any(endpoint.load.requests == 0 or 0.0 < endpoint.view.kv_usage < COLD for endpoint in endpoints):
        return False
    return not any(min(headrooms) >= 0.0 for headrooms in wanted.headrooms(forecast, endpoints))


def _fullness(by_load: ShedByLoad, endpoint: Endpoint) -> float:
    if endpoint.metrics.freshness is Freshness.STALE:
        return 1.0
    view = endpoint.view
    return max(view.waiting / by_load.queue_depth, view.kv_usage / by_load.kv_usage)


@dataclass(eq=False)
class FlowSeries:
    """Metrics of the queue of a pool."""

    catalogue: Catalogue
    pool: str

    def admitted(self, band: str, waited: float) -> None:
        self.catalogue.queue_wait.cell(self.pool, band).observe(waited)

    def refused(self, band: str, reason: Reason) -> None:
        self.catalogue.queue_refused.cell(self.pool, band, reason.value).add()

    def read(self, queue: Queue, capacity: Capacity) -> None:
        """Set the gauges before an exposition."""
        for band in queue.bands:
            self.catalogue.queue_length.cell(self.pool, band.name).value = band.length
            self.catalogue.queue_bytes.cell(self.pool, band.name).value = band.bytes
        self.catalogue.saturation.cell(self.pool).value = capacity.saturation()

    def end(self) -> None:
        """Clear the gauges; the queues that remain set theirs before every exposition."""
        for gauge in (self.catalogue.queue_length, self.catalogue.queue_bytes, self.catalogue.saturation):
            gauge.clear()
