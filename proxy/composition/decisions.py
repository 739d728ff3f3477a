"""Who chooses the pod: schedulings with all that their plugins have from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from proxy.composition.explaining import Explaining
from proxy.composition.observation import Observation
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.listener import Listener
from proxy.core.plugin_faults import PluginFaults
from proxy.core.ports import Clock, KvEvents, Random, Timer, Tokenizers
from proxy.core.record import DecisionRecord
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.core.state import Draft
from proxy.core.wiring import Ports
from proxy.fleet.store import Fleet, PoolPods
from proxy.kvevents.subscriptions import KvSubscriptions
from proxy.latency.forecast import LATENCY
from proxy.scheduling.build import Keep, Scheduling, build
from proxy.scheduling.document import Document
from proxy.settings import Settings
from proxy.telemetry.observer import Observer
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
        fleet: Fleet,
        observation: Observation,
        explaining: Explaining,
    ) -> None:
        self.explaining = explaining
        self._registry = registry or Registry.discover()
        self._observation = observation
        self._clock = clock
        self._random = rng
        self._fleet = fleet
        self._faults = PluginFaults(clock, lambda *fault: observation.observer.plugin_fault(*fault))
        self.schedulings: Mapping[str, Scheduling] = {}

    def build(self, settings: Settings, draft: Draft) -> dict[str, Scheduling]:
        """By pool. When the draft is committed, predecessors hand over what their plugins know. Raises ConfigError."""
        predecessors = self.schedulings
        made = {
            name: build(
                pool.scheduling,
                self._registry,
                self._ports(name, draft),
                self._faults,
                _keeping(name, draft),
            )
            for name, pool in settings.all_pools.items()
        }
        for name in made.keys() & predecessors.keys():
            draft.at_commit(partial(made[name].succeed, predecessors[name]))
        return made

    def imagined(self, pool: str, document: Document, draft: Draft) -> Scheduling:
        """That of a document in the place of the pool's own, with its plugins where they have the same parameters; what
        has others knows nothing. Discard the draft when it is of no use any more. Raises ConfigError."""
        return build(document, self._registry, self._ports(pool, draft), keep=_keeping(pool, draft))

    def _ports(self, pool: str, draft: Draft) -> Ports:
        return {
            Clock: self._clock,
            Random: self._random,
            KvEvents: KvSubscriptions(pool, PoolPods(self._fleet, pool).watch, draft),
            Tokenizers: TokenSource(self._clock.wall, draft),
            Timer: _LOOP,
        }


class Shadows(Listener):
    """Counts what shadow profiles would have chosen beside the decisions."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision,
        started: float,
        record: DecisionRecord | None,
    ) -> None:
        forecast = request.state.read(LATENCY)
        for result in decision.shadows:
            self._observer.shadow(decision, result)
            if forecast is not None:
                chosen, other = forecast.ttfts((decision.target, result.best))
                self._observer.regret(result.profile, chosen - other)


def _keeping(pool: str, draft: Draft) -> Keep:
    return lambda name, make, of: draft.get(("plugin", pool, name), make, of)
