"""Who chooses the pod: schedulings with all that their plugins have from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

from proxy.composition.explaining import Explaining
from proxy.composition.observation import Observation
from proxy.core.decision import Decision, ProfileResult
from proxy.core.plugin_faults import PluginFaults
from proxy.core.ports import Clock, KvEvents, Random, Timer, Tokenizers
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.core.wiring import Ports
from proxy.explain.kept import Kept
from proxy.fleet.datastore import Fleet
from proxy.fleet.pool_pods import PoolPods
from proxy.kvevents.subscriptions import KvSubscriptions
from proxy.latency.forecast import LATENCY
from proxy.scheduling.build import Scheduling, Watch, build
from proxy.scheduling.document import Document
from proxy.settings import Settings
from proxy.telemetry.timing import EVERY, Timing
from proxy.tokens.source import TokenSource


class _Loop:
    """The event loop as a `ports.Timer`."""

    sleep = staticmethod(asyncio.sleep)


_LOOP = _Loop()


class Decisions:
    """`schedulings` are those in use, by pool."""

    def __init__(
        self,
        registry: Registry | None,
        clock: Clock,
        rng: Random,
        observation: Observation,
        explaining: Explaining,
    ) -> None:
        self.explaining = explaining
        self._registry = registry or Registry.discover()
        self._observation = observation
        self._clock = clock
        self._random = rng
        self._faults = PluginFaults(clock, lambda *fault: observation.observer.plugin_fault(*fault))
        self._kv_events: dict[str, KvSubscriptions] = {}
        """By pool; and below what has them fulfilled, once that has begun."""
        self._following: dict[str, AsyncExitStack] = {}
        self._tokens = TokenSource(clock.wall)
        self._watch = Watch(Timing(observation.catalogue, time.perf_counter).wrap, EVERY)
        self.schedulings: Mapping[str, Scheduling] = {}

    def build(self, settings: Settings, kept: Kept | None) -> dict[str, Scheduling]:
        """By pool. When all of them are made, predecessors hand over what their plugins know. Raises ConfigError."""
        predecessors = self.schedulings
        made = {
            name: build(
                pool.scheduling,
                self._registry,
                self._ports(name),
                self._watch,
                self._faults,
                self.shadow,
                predecessors.get(name),
            )
            for name, pool in settings.all_pools.items()
        }
        for name in made.keys() & predecessors.keys():
            made[name].succeed(predecessors[name])
        return {name: self._as_kept(one, name, len(made) == 1, kept) for name, one in made.items()}

    def imagined(self, pool: str, document: Document) -> Scheduling:
        """That of a document in the place of the pool's own, with its plugins where they have the same parameters; what
        has others knows nothing. Call `keep_what_is_used` when it is of no use any more. Raises ConfigError."""
        return build(document, self._registry, self._ports(pool), predecessor=self.schedulings[pool])

    async def begin(self, stack: AsyncExitStack, fleet: Fleet) -> None:
        self._fleet = fleet
        await stack.enter_async_context(self._tokens)
        stack.push_async_callback(self._end)
        await self.keep_what_is_used()

    async def keep_what_is_used(self) -> None:
        """By the schedulings; of what others asked for nothing is left."""
        await self._tokens.keep(lambda thing: any(one.holds(thing) for one in self.schedulings.values()))
        for name in self._kv_events.keys() - self.schedulings.keys():
            del self._kv_events[name]
            await self._following.pop(name, AsyncExitStack()).aclose()
        for name, scheduling in self.schedulings.items():
            await self._kv_events[name].keep(scheduling.holds)
            if name not in self._following:
                self._following[name] = stack = AsyncExitStack()
                watch = PoolPods(self._fleet, name).watch
                await stack.enter_async_context(self._kv_events[name].following(watch))

    def _as_kept(self, scheduling: Scheduling, pool: str, alone: bool, kept: Kept | None) -> Scheduling:
        """As it is, where decisions are not kept. `alone`: there is no other pool."""
        if kept is None:
            return scheduling
        notes = self.explaining.notes(scheduling, pool, alone)
        return self.explaining.around(scheduling, notes, kept, self.shadow)

    async def _end(self) -> None:
        for stack in self._following.values():
            await stack.aclose()

    def _ports(self, pool: str) -> Ports:
        kv_events = self._kv_events.setdefault(pool, KvSubscriptions())
        return {
            Clock: self._clock,
            Random: self._random,
            KvEvents: kv_events,
            Tokenizers: self._tokens,
            Timer: _LOOP,
        }

    def shadow(self, request: InferenceRequest, decision: Decision, result: ProfileResult) -> None:
        """What a shadow profile would have chosen beside the decision."""
        observer = self._observation.observer
        observer.shadow(decision, result)
        forecast = request.state.read(LATENCY)
        if forecast is not None:
            chosen, other = forecast.ttfts((decision.target, result.best))
            observer.regret(result.profile, chosen - other)
