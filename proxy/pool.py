"""A pool of pods with its data producers and listeners, and the choice among pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from proxy.core.decision import DecisionRecord
from proxy.core.endpoint import DEFAULT_POOL, Endpoint
from proxy.core.errors import AllFailed, NoEndpoints
from proxy.core.listener import NO_LISTENERS, Listeners
from proxy.core.plugin import DataProducer
from proxy.core.ports import Admission, Relay
from proxy.core.request import InferenceRequest
from proxy.fleet.bindings import Bindings
from proxy.fleet.store import Pods
from proxy.models.resolver import with_fresh_state
from proxy.openai.parse import Parsed
from proxy.scheduling.build import Scheduling

if TYPE_CHECKING:
    from proxy.disagg.transfer import SplitRequests

log = logging.getLogger(__name__)

PRODUCE_DEADLINE = 0.4
"""Seconds for all data producers of a request together; what a producer declares in `takes` is added."""

Raised = Callable[[DataProducer, str, Exception], None]
"""Called with a producer that raised, a description of what failed, and the error."""

NameOf = Callable[[DataProducer], str]
"""Return the name of a producer in the configuration."""


def _derives(producer: DataProducer) -> bool:
    """Return whether the producer is synchronous: it overrides `derive` and not `produce`."""
    cls = type(producer)
    return cls.derive is not DataProducer.derive and cls.produce is DataProducer.produce


class Producers:
    """The data producers of a pool. Producers that may wait come last, unless another producer needs their data."""

    def __init__(self, producers: Sequence[DataProducer], raised: Raised, name: NameOf) -> None:
        self._raised = raised
        self._name = name
        waits_from = next((at for at, producer in enumerate(producers) if producer.waits), len(producers))
        immediate, self._waiting = tuple(producers[:waits_from]), tuple(producers[waits_from:])
        self._deriving = tuple(takewhile(_derives, immediate))
        self._immediate = immediate[len(self._deriving) :]
        self.has_coroutines = bool(self._immediate or self._waiting)
        """Whether `derive` does not run all producers."""
        self.waits = bool(self._waiting)
        """Whether the state of the fleet may change while the producers run."""
        self._deadline = PRODUCE_DEADLINE + sum(producer.takes for producer in producers)

    async def run(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None = None
    ) -> None:
        """Run all producers. It never fails: scorers handle missing data."""
        self.derive(request, endpoints, record)
        if self.has_coroutines:
            await self.produce(request, endpoints, record)

    def derive(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None = None
    ) -> None:
        """Run the synchronous producers."""
        endpoints = tuple(endpoints)
        for producer in self._deriving:
            try:
                if record is None:
                    producer.derive(request, endpoints)
                else:
                    name = self._name(producer)
                    record.call("DataProducer", producer, name, producer.derive, request, endpoints)
            except Exception as error:  # noqa: BLE001  # the request goes on without the datum
                self._failed(producer, request, error)

    async def produce(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None = None
    ) -> None:
        """Run the coroutines after the synchronous producers."""
        endpoints = tuple(endpoints)
        await self._produce(self._immediate, request, endpoints, record)
        if not self._waiting:
            return
        try:
            async with asyncio.timeout(self._deadline):
                await self._produce(self._waiting, request, endpoints, record)
        except TimeoutError:
            log.warning(
                "request %s: scheduling without the data of producers that did not finish within %g s",
                request.id,
                self._deadline,
            )

    async def _produce(
        self,
        producers: Sequence[DataProducer],
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        record: DecisionRecord | None,
    ) -> None:
        for producer in producers:
            try:
                work = producer.produce(request, endpoints)
                if record is not None:
                    work = record.wait("DataProducer", producer, self._name(producer), work)
                await work
            except Exception as error:  # noqa: BLE001  # the request goes on without the datum
                self._failed(producer, request, error)

    def _failed(self, producer: DataProducer, request: InferenceRequest, error: Exception) -> None:
        self._raised(producer, f"failed to produce for request {request.id}, which goes on without", error)


@dataclass(slots=True, eq=False)
class Pool:
    """One pool under one configuration. An attempt keeps the listeners with which it started."""

    pods: Pods
    scheduling: Scheduling
    admissions: Sequence[Admission] = ()
    name: str = DEFAULT_POOL
    split_requests: SplitRequests | None = None
    common: Listeners = NO_LISTENERS
    """The listeners of all pools."""
    listeners: Listeners = field(init=False)
    """The common listeners, then the admissions of the pool and the hooks of its plugins."""
    producers: Producers = field(init=False)

    def __post_init__(self) -> None:
        scheduling = self.scheduling
        self.listeners = self.common.plus(*self.admissions, hooks=scheduling)
        self.producers = Producers(scheduling.producers, scheduling.raised, scheduling.name_of)


Send = Callable[[InferenceRequest, Parsed, Relay], Awaitable[None]]
ServeIn = Callable[[Pool, InferenceRequest, Parsed, Relay], Awaitable[None]]


class Pools:
    """All pools, in the order in which they are tried. `send` serves a request in one of them. It is one of three
    functions, so that requests pay for no step that the configuration does not have: `_to_one` with several pools,
    `_admitted` with one pool that has admissions, `serve_in` (`Gateway._serve_in_pool`) with neither."""

    def __init__(self, pools: Sequence[Pool], bindings: Bindings, serve_in: ServeIn) -> None:
        first, *others = self._pools = pools
        self._bindings = bindings
        self._serve_in_pool = serve_in
        self._named = {pool.name: pool for pool in pools}
        self.send: Send = self._to_one if others else partial(self._admitted if first.admissions else serve_in, first)

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def named(self, name: str) -> Pool:
        return self._named[name]

    def first_for(self, request: InferenceRequest) -> Pool:
        """Return the pool that is tried first for a request without a stored response."""
        return self._next(request, ()) or self._pools[0]

    def having(self, endpoint: Endpoint) -> Pool:
        """Return the pool of a pod; the first pool if the pod's pool is gone."""
        return self._named.get(endpoint.pool, self._pools[0])

    def holding(self, response_id: str) -> Pool:
        """Return the pool of the pod with the stored response; the first pool if unknown."""
        holder = self._bindings.find(response_id)
        return self._pools[0] if holder is None else self.having(holder)

    async def _to_one(self, request: InferenceRequest, parsed: Parsed, relay: Relay) -> None:
        """Send to the first pool that may have it, and to the next one if no pod of the first is ready or responds."""
        pool: Pool | None = self._holding(parsed) or self._next(request, ()) or self._pools[0]
        tried: list[Pool] = []
        while pool is not None:
            tried.append(pool)
            try:
                await self._admitted(pool, request, parsed, relay)
                return
            except (NoEndpoints, AllFailed):
                pool = None if self._holding(parsed) else self._next(request, tried)
                if pool is None:
                    raise
            request = with_fresh_state(request)

    async def _admitted(self, pool: Pool, request: InferenceRequest, parsed: Parsed, relay: Relay) -> None:
        async with AsyncExitStack() as stack:
            for admission in pool.admissions:
                await stack.enter_async_context(admission.admit(request))
            await self._serve_in_pool(pool, request, parsed, relay)

    def _holding(self, parsed: Parsed) -> Pool | None:
        """Return the only pool with the stored response that the request refers to."""
        return self.holding(parsed.previous_response_id) if parsed.previous_response_id else None

    def _next(self, request: InferenceRequest, tried: Sequence[Pool]) -> Pool | None:
        """Return the configured pool, else the first one with a ready pod that lists the model, else one whose pods
        list none."""
        if request.naming is not None and request.naming.pool:
            return None if tried else self._named.get(request.naming.pool)
        takers = []
        for pool in self._pools:
            if pool not in tried and (pods := pool.pods.endpoints_for(request.model)):
                if any(pod.models for pod in pods):
                    return pool
                takers.append(pool)
        return takers[0] if takers else None
