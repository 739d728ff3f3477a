"""The requests of one priority that wait: a flow for each tenant, in a flow the requests in their order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from proxy.core.errors import QueueFull
from proxy.core.request import InferenceRequest
from proxy.flowcontrol.service import Attained
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings
from proxy.latency.objectives import objectives

LEAST_SERVICE = "least-service"

IDLE_FLOWS = 1000
"""Flows without anybody waiting that are remembered, for what they have had."""
CLEARLY = 0.9
"""A tenant with more than this share of what the one with most has waiting would soon be that one."""
DEAD_ENTRIES = 64
"""Of those that wait no more, beside as many as wait, that a flow may still hold."""


class Waiting:
    """A request in the queue, which leaves it for a pod or with a refusal. `since` is in monotonic seconds, `cost` is
    in tokens of its prompt."""

    __slots__ = ("band", "cost", "flow", "key", "leave", "request", "since")

    def __init__(
        self, request: InferenceRequest, band: Band, since: float, leave: Callable[[QueueFull | None], None]
    ) -> None:
        self.request = request
        self.band = band
        self.since = since
        self.leave = leave
        self.cost = max(1, request.prompt.tokens)
        self.key = band.key(request, since)
        self.flow: Flow | None = None
        """None while it has not had to wait."""

    def recount(self, tokens: int) -> None:
        """What it costs, as is known after a pod was chosen: its uncached tokens."""
        cost = max(1, tokens)
        if self.flow is not None and self.band.counts_tokens:
            self.flow.served += (cost - self.cost) / self.flow.share
        self.cost = cost


class Flow:
    """The requests of one tenant in one band. `served` is what it has had, divided by its share."""

    __slots__ = ("_heap", "served", "share", "waiting")

    def __init__(self, share: float) -> None:
        self.share = share
        self.served = 0.0
        self.waiting: dict[Waiting, None] = {}
        """As they came."""
        self._heap: list[tuple[float, int, Waiting]] = []

    def push(self, number: int, waiting: Waiting) -> None:
        heappush(self._heap, (waiting.key, number, waiting))
        self.waiting[waiting] = None

    def drop(self, waiting: Waiting) -> None:
        """The heap lets go of it when it comes to its top, or of all of them when they are many."""
        del self.waiting[waiting]
        if len(self._heap) > 2 * len(self.waiting) + DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2] in self.waiting]
            heapify(self._heap)

    @property
    def first(self) -> tuple[float, int, Waiting]:
        """Of those that wait; there is one."""
        while self._heap[0][2] not in self.waiting:
            heappop(self._heap)
        return self._heap[0]

    @property
    def last(self) -> Waiting:
        """The one that came last; there is one."""
        return next(reversed(self.waiting))

    @property
    def length(self) -> float:
        """Of what waits, by its share."""
        return len(self.waiting) / self.share


class Band:
    """All of one priority. Fairness is start-time fair queuing (Goyal, Vin and Cheng, 1996): whoever has had least goes
    first, and whoever has not waited for long starts with what the others have had. Or it is least attained service:
    what a tenant has had in all bands, and how long it waits."""

    def __init__(self, settings: BandSettings, defaults: FlowControlSettings, attained: Attained) -> None:
        self.priority = settings.priority
        self.name = settings.name or str(settings.priority)
        self.ceiling = settings.ceiling
        self.depth = 0.0
        """Where it is among all bands: 0 the highest, 1 the lowest."""
        self.timeout: float = settings.queue_timeout or defaults.queue_timeout
        self.ordering = settings.ordering or defaults.ordering
        self.waiting = 0
        self.bytes = 0
        self.models: dict[str, int] = {}
        """How many wait for which."""
        self._fairness = settings.fairness or defaults.fairness
        self.counts_tokens = self._fairness == "deficit-round-robin"
        self._most = math.inf if settings.max_queued is None else settings.max_queued
        self._most_bytes = settings.max_queued_bytes or math.inf
        self._shares = defaults.shares
        self._attained = attained
        self._least_service = defaults.least_service
        self._numbers = itertools.count()
        self._flows: dict[str, Flow] = {}
        self._served = 0.0
        """What the flow had had that was the last to have its turn."""

    def succeed(self, other: Band) -> None:
        """Takes the place of another one, with all that wait there and what each tenant has had."""
        self._served = other._served
        for tenant, flow in other._flows.items():
            mine = self._begin(tenant)
            mine.served = flow.served * flow.share / mine.share
        for waiting in sorted((one for flow in other._active() for one in flow.waiting), key=attrgetter("since")):
            waiting.band, waiting.key = self, self.key(waiting.request, waiting.since)
            self.push(waiting)

    def push(self, waiting: Waiting) -> None:
        request = waiting.request
        flow = self._flows.get(request.tenant) or self._begin(request.tenant)
        if not flow.waiting:
            flow.served = max(flow.served, self._served)
        waiting.flow = flow
        flow.push(next(self._numbers), waiting)
        self.waiting += 1
        self.bytes += len(request.body)
        self.models[request.model] = self.models.get(request.model, 0) + 1

    def due(self, full: Collection[str]) -> Waiting | None:
        """The first that goes on, those aside whose models are full."""
        if all(model in full for model in self.models):
            return None
        return next((waiting for waiting in self._heads() if waiting.request.model not in full), None)

    def take(self, waiting: Waiting) -> None:
        """It goes on."""
        flow = waiting.flow
        self.drop(waiting)
        if flow is not None:
            self._served = max(self._served, flow.served)
            flow.served += (waiting.cost if self.counts_tokens else 1) / flow.share

    def drop(self, waiting: Waiting) -> None:
        """It waits no more."""
        flow, request = waiting.flow, waiting.request
        if flow is None or waiting not in flow.waiting:
            return
        flow.drop(waiting)
        self.waiting -= 1
        self.bytes -= len(request.body)
        left = self.models.pop(request.model) - 1
        if left:
            self.models[request.model] = left

    def is_full_for(self, request: InferenceRequest) -> bool:
        return self.waiting >= self._most or self.bytes + len(request.body) > self._most_bytes

    def ahead(self, waiting: Waiting) -> int:
        """Of those in the band, how many go before it. As an estimate: flows have their turns, one request each."""
        if self._fairness == "strict":
            return sum(self._before(flow, waiting) for flow in self._active())
        own = self._flows.get(waiting.request.tenant)
        mine = self._before(own, waiting) if own is not None else 0
        return mine + sum(min(len(flow.waiting), mine + 1) for flow in self._active() if flow is not own)

    def last(self) -> Waiting | None:
        """The last one of the longest flow."""
        return max(self._active(), key=attrgetter("length")).last if self.waiting else None

    def gives_way(self, waiting: Waiting) -> Waiting | None:
        """Who should leave for it where there is no room for all: the last of a tenant with clearly more waiting."""
        last = self.last() if self._fairness != "strict" else None
        if last is None or last.flow is None:
            return None
        tenant = waiting.request.tenant
        return last if last.flow.length * CLEARLY > (self.waiting_of(tenant) + 1) / self._share(tenant) else None

    def alike(self, tenant: str) -> int:
        """How many wait that would not make room for one of this tenant, whatever it has waiting."""
        return self.waiting if self._fairness == "strict" else self.waiting_of(tenant)

    def waiting_of(self, tenant: str) -> int:
        flow = self._flows.get(tenant)
        return 0 if flow is None else len(flow.waiting)

    def tenants(self) -> Iterator[tuple[str, int, float]]:
        """Those who have requests waiting: how many, and since when the oldest one waits."""
        for tenant, flow in self._flows.items():
            if flow.waiting:
                yield tenant, len(flow.waiting), next(iter(flow.waiting)).since

    def key(self, request: InferenceRequest, since: float) -> float:
        """Within a flow the smallest goes first."""
        if self.ordering == "edf":
            return min(request.deadline, since + self.timeout)
        if self.ordering == "slo-deadline":
            return request.received_at + objective(request)
        return since

    def _heads(self) -> Iterator[Waiting]:
        """The first of each flow, in the order in which they are due."""
        active = self._active()
        if self._fairness == LEAST_SERVICE:
            return iter(self._by_service([flow.first[2] for flow in active]))
        active.sort(key=attrgetter("first" if self._fairness == "strict" else "served"))
        return (flow.first[2] for flow in active)

    def _by_service(self, heads: Sequence[Waiting]) -> list[Waiting]:
        weights = self._least_service
        had = _spread([self._attained.had(one.request.tenant) / self._share(one.request.tenant) for one in heads])
        late = _spread([one.since for one in heads])
        last = {
            one: weights.weight * much + weights.wait_weight * at
            for one, much, at in zip(heads, had, late, strict=True)
        }
        return sorted(heads, key=lambda one: (last[one], one.since))

    def _before(self, flow: Flow, waiting: Waiting) -> int:
        if self.ordering == "fcfs":
            return len(flow.waiting)
        return sum(1 for other in flow.waiting if other.key <= waiting.key)

    def _active(self) -> list[Flow]:
        return [flow for flow in self._flows.values() if flow.waiting]

    def _begin(self, tenant: str) -> Flow:
        if len(self._flows) >= IDLE_FLOWS + self.waiting:
            self._flows = {name: flow for name, flow in self._flows.items() if flow.waiting}
        flow = self._flows[tenant] = Flow(self._share(tenant))
        return flow

    def _share(self, tenant: str) -> float:
        return self._shares.get(tenant, 1.0)


def _spread(values: Sequence[float]) -> list[float]:
    """From 0 to 1."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def objective(request: InferenceRequest) -> float:
    """Seconds to the first token that the client wants at most; infinite if it does not say."""
    said = objectives(request)
    return math.inf if said is None or said.ttft is None else said.ttft
