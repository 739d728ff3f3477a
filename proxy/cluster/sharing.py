"""The proxy that shares its state with others, and the proxy of one process among other hosts."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

from proxy.app import App
from proxy.cluster.deployment import Alone, Deployment, ReplicaSeries
from proxy.cluster.messages import Kind, record
from proxy.cluster.prefixes import SharedIndex, index_tag
from proxy.cluster.redis_transport import check
from proxy.cluster.replica import Doubts, Replica
from proxy.cluster.settings import INTERVAL, ReplicaSettings
from proxy.cluster.shared import SharedDrains, SharedLimits, SharedQueue, SharedSessions, said, table_tag
from proxy.cluster.transport import NEWS, Local
from proxy.config.load import Reader
from proxy.config.reload import Configurations
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.registry import Registry
from proxy.fleet.bindings import SharedBindings
from proxy.fleet.ledger import SharedLedger
from proxy.fleet.store import Fleet
from proxy.flowcontrol.capacity import Lent, Siblings
from proxy.flowcontrol.controller import FlowControl
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.sessions import SessionAffinity
from proxy.prefix.index import PrefixIndex
from proxy.reliability.breaker import OPEN, Company
from proxy.settings import Settings
from proxy.telemetry.metrics import Catalogue

MOST_BINDINGS = 20_000
"""That those who join are told of: the ones used last."""


class SharingApp(App):
    """Whoever inherits from it connects `_replica`."""

    ledger: SharedLedger
    _bindings: SharedBindings
    _seat = 0
    """Which of the workers of its host this one is."""

    @cached_property
    def _name(self) -> str:
        """That no other process has, or will have."""
        return secrets.token_hex(6)

    @cached_property
    def _replica(self) -> Replica:
        return Replica(
            endpoints=lambda: self.fleet.endpoints,
            apply=self._used_elsewhere,
            told=self._told,
            bound=self._bound_elsewhere,
            bindings=lambda: self._bindings.recent(MOST_BINDINGS),
            doubts=lambda: shared_doubts(self.fleet),
            doubted=lambda peer, doubts: self.fleet.peer_ejected(peer, doubts),
            broke=self._broke_elsewhere,
            tried=self._tried_elsewhere,
            lost=self._lost,
            dropped=self._catalogue.bus_dropped.cell(),
            garbled=self._catalogue.bus_garbled.cell(),
        )

    def _told(self, kind: Kind, record: bytes) -> None:
        """What is said of the pods."""
        raise NotImplementedError

    def _lost(self) -> None:
        """Nobody is there any more who could say anything."""

    def _make_ledger(self) -> SharedLedger:
        loads = self._replica.own_loads
        return SharedLedger(self._clock, loads.dispatched, loads.eased)

    def _make_bindings(self) -> SharedBindings:
        return SharedBindings(self._clock, self._replica.bound)

    def _indexes(self) -> Sequence[PrefixIndex]:
        """Those that a producer has kept, or taken over, go on."""
        self._replica.indexes = [
            self._shared_index(pool, producer)
            for pool, scheduling in self.schedulings.items()
            for producer in scheduling.plugins(ApproxPrefixCacheProducer)
        ]
        return self._replica.indexes

    def _shared_index(self, pool: str, producer: ApproxPrefixCacheProducer) -> SharedIndex:
        if not isinstance(producer.index, SharedIndex):
            producer.index = SharedIndex(
                self._clock,
                producer.max_bytes,
                tag=index_tag(f"{pool}/{producer.name}", producer.block_size_tokens),
                touch=self._replica.touch_later,
                flush=self._replica.flush,
                find=self._replica.roster.get,
            )
        return producer.index

    def _share(self) -> None:
        self._share_sessions()
        self._share_limits()
        self._share_queues()

    def _share_sessions(self) -> None:
        """Nothing is told of tables whose sessions are kept by the clients: nothing is bound in them."""
        replica = self._replica
        replica.sessions = [
            SharedSessions(
                plugin.table, self._clock, tag=table_tag(f"{pool}/{name}"), tell=replica.tell, find=self.fleet.get
            )
            for pool, scheduling in self.schedulings.items()
            for name, plugin in scheduling.instances.items()
            if isinstance(plugin, SessionAffinity)
        ]

    def _share_limits(self) -> None:
        limits = self.serving.limits
        if limits is not None and limits.on_spent is None:
            self._replica.limits = [SharedLimits(limits, self._replica.tell)]
            limits.seated(self._workers, self._seat, NEWS)
            self._replica.be_limited()

    def _share_queues(self) -> None:
        """Those that are shared stay: siblings have said who waits."""
        flow_controls, known = self.serving.flow_controls, {queue.pool: queue for queue in self._replica.queues}
        self._replica.queues = [
            known.get(pool) or self._shared_queue(pool, control) for pool, control in flow_controls.items()
        ]

    def _shared_queue(self, pool: str, flow_control: FlowControl) -> SharedQueue:
        def tell(highest: int | None, given: Lent, wants: Sequence[str]) -> None:
            self._replica.tell(Kind.WAITING, said(pool, self._name, highest, given, wants))

        siblings = flow_control.siblings = Siblings(self._workers, tell, self._seat, self._name)
        siblings.among(*self._replica.place)
        return SharedQueue(pool, siblings, flow_control.look)

    def _used_elsewhere(self, endpoint: Endpoint, requests: int, tokens: int, work: int) -> None:
        self.ledger.elsewhere(endpoint, requests, tokens, work)
        self._roomier(endpoint)

    def _bound_elsewhere(self, response_id: str, name: str) -> None:
        if endpoint := self.fleet.get(name):
            self._bindings.bound_elsewhere(response_id, endpoint)

    def _make_company(self) -> Company:
        return self._replica

    def _broke_elsewhere(self, name: str, is_open: bool) -> None:
        if endpoint := self.fleet.get(name):
            self._process.breakers.hear(endpoint, is_open)

    def _tried_elsewhere(self, name: str) -> None:
        if endpoint := self.fleet.get(name):
            self._process.breakers.hold_off(endpoint)


def shared_doubts(fleet: Fleet) -> Doubts:
    """All of its own but those of open breakers: each process that hears of one opens its own, with its own timer."""
    return {name: [why for why in whys if why != OPEN] for name, whys in fleet.own_ejections().items()}


class Others:
    """The other hosts, and what operators told any of them about pods. Raises ConfigError if the library is missing."""

    def __init__(
        self,
        settings: ReplicaSettings,
        fleet: Fleet,
        clock: Clock,
        rng: Random,
        catalogue: Catalogue,
        configurations: Configurations,
        local: Local,
        gathers: bool = True,
    ) -> None:
        check(settings)
        self._fleet = fleet
        self.drains = SharedDrains(self._drain, lambda body: self.deployment.say(0, record(Kind.DRAINS, body)))
        self.deployment = Deployment(
            settings,
            clock,
            rng,
            ReplicaSeries(catalogue),
            local,
            config=lambda: configurations.of_deployment,
            own=lambda: record(Kind.DRAINS, self.drains.all()),
            gathers=gathers,
        )
        fleet.watch(self.drains.added, self.drains.removed)

    def _drain(self, name: str, drains: bool) -> None:
        if drains:
            self._fleet.drain(name)
        else:
            self._fleet.undrain(name)


class Replicated(SharingApp):
    """Without workers, and among other proxies."""

    def __init__(self, settings: Settings, registry: Registry | None = None, reader: Reader | None = None) -> None:
        super().__init__(settings, registry, reader)
        self.fleet.watch(self._replica.added, self._replica.removed)
        self._others = Others(
            settings.replicas,
            self.fleet,
            self._clock,
            self._random,
            self._catalogue,
            self.configurations,
            self._replica,
            gathers=False,
        )
        self._replica.join(Alone(self._others.deployment), INTERVAL)

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """The pods first: what others say of pods that are not known is lost."""
        first_contact = await super()._know_the_fleet(stack)
        await stack.enter_async_context(self._others.deployment)
        stack.push_async_callback(self._replica.close)
        return first_contact

    def _told(self, kind: Kind, record: bytes) -> None:
        if kind is Kind.DRAINS:
            self._others.drains.take(record)

    def _drained(self, endpoint: Endpoint) -> None:
        self._others.drains.turned(endpoint, self.fleet.drains(endpoint))

    def _replicas(self) -> Mapping[str, Any]:
        return self._others.deployment.status()


def app_of(settings: Settings, reader: Reader | None = None) -> App:
    """The proxy of one process. Raises ConfigError."""
    return (Replicated if settings.replicas.is_shared else App)(settings, reader=reader)
