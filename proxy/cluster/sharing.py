"""A proxy that shares its state with other processes, and the proxy of one process in a deployment of several hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from math import inf
from typing import Any
from zlib import crc32

import orjson
from xxhash import xxh3_64_intdigest

from proxy.app import App
from proxy.auth.limits import RateLimiter
from proxy.cluster.deployment import Deployment
from proxy.cluster.messages import InvalidMessage, Packet, RecordKind
from proxy.cluster.prefixes import SharedIndex, index_tag
from proxy.cluster.redis_transport import check
from proxy.cluster.replica import Replica, new_id
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.shared import (
    Shared,
    SharedBreakers,
    SharedDrains,
    SharedLimits,
    SharedQueue,
    SharedSessions,
    SharedSpeeds,
)
from proxy.cluster.transport import HOST_DELAY
from proxy.config.load import ConfigReader
from proxy.config.reload import Configurations
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.registry import Registry
from proxy.core.state import Draft
from proxy.fleet.bindings import BindingTable
from proxy.fleet.ledger import SharedLedger
from proxy.fleet.mirror import dumped, metrics_values, read_metrics
from proxy.fleet.store import Fleet
from proxy.flowcontrol.capacity import Lent, SharedCaps
from proxy.flowcontrol.controller import FlowControl
from proxy.latency.rates import FleetModel
from proxy.polling import Polling
from proxy.prefix.index import PrefixIndex
from proxy.serving import Process, Serving
from proxy.settings import Settings
from proxy.telemetry.metrics import Catalogue


class SharingApp(App):
    """A proxy that shares its state. Subclasses connect `_replica`."""

    ledger: SharedLedger
    _id: bytes
    """The id of this process, which no other process ever has; set before the app is constructed."""
    _seat = 0
    """The seat of this worker on its host."""
    _beat_every = inf

    @cached_property
    def _replica(self) -> Replica:
        replica = Replica(
            self._id,
            self._clock,
            endpoints=lambda: self.fleet.endpoints,
            apply=self._used_elsewhere,
            receive=self._receive,
            catalogue=self._catalogue,
            lost=self._lost,
            lease=self._settings.replicas.lease,
            beat_every=self._beat_every,
        )
        replica.publishes_lasting = self._seat == 0
        return replica

    def _receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        """Apply what the supervisor publishes beside shared state."""

    def _lost(self) -> None:
        """Handle the loss of the supervisor."""

    def _make_process(self, settings: Settings, registry: Registry | None) -> Process:
        """Share what a process makes once, before its first configuration."""
        process, replica = super()._make_process(settings, registry), self._replica
        breakers = SharedBreakers(process.breakers, self.fleet.get, replica.publish, lambda: replica.place)
        replica.state.put(process=[breakers, self._share_bindings("responses", process.bindings.table)])
        return process

    def _make_ledger(self) -> SharedLedger:
        loads = self._replica.own_loads
        return SharedLedger(self._clock, loads.dispatched, loads.eased)

    def _use(self, serving: Serving, draft: Draft) -> None:
        super()._use(serving, draft)
        self._replica.share(self.state.shared)

    def _share(self, key: Hashable, made_from: object, made: object) -> tuple[object, Shared | None]:
        """Share a new object of `State`, if it is of a class that processes share. A key of a plugin has its
        pool and its name, which are the same in all processes: a plugin shares one object of each class."""
        replica, clock = self._replica, self._clock
        match key, made:
            case ("plugin state", pool, name, *_), PrefixIndex():
                tag = index_tag(f"{pool}/{name}", made_from)
                touch, flush, find = replica.touch_later, replica.flush, replica.roster.get
                index = SharedIndex(clock, made.max_bytes, tag=tag, touch=touch, flush=flush, find=find)
                return index, index
            case ("plugin state", pool, name, *_), BindingTable():
                return made, self._share_bindings(f"{pool}/{name}", made)
            case ("plugin state", pool, name, *_), FleetModel():
                return made, SharedSpeeds(made, f"{pool}/{name}", self.fleet.get)
            case ("flow-control", str(pool)), FlowControl():
                return made, self._share_caps(pool, made)
            case "limits", RateLimiter():
                made.set_worker(self._workers, self._seat, HOST_DELAY)
                made.set_hosts(replica.spending_hosts)
                return made, SharedLimits(made, replica.publish, self._settings.replicas.lease)
        return made, None

    def _share_bindings(self, name: str, table: BindingTable) -> SharedSessions:
        return SharedSessions(table, self._clock, name=name, publish=self._replica.publish, find=self.fleet.get)

    def _share_caps(self, pool: str, flow_control: FlowControl) -> SharedQueue:
        name = self._id.hex()

        def publish(highest: int | None, since: float, given: Lent, wants: Sequence[str]) -> None:
            self._replica.publish(RecordKind.WAITING, SharedQueue.packed(pool, name, highest, since, given, wants))

        shared_caps = flow_control.shared_caps = SharedCaps(self._workers, publish, self._seat, name)
        shared_caps.place = self._replica.place
        return SharedQueue(pool, shared_caps, flow_control.admit_soon)

    def _used_elsewhere(self, endpoint: Endpoint, requests: int, tokens: int, work: int) -> None:
        self.ledger.elsewhere(endpoint, requests, tokens, work)
        self._capacity_freed(endpoint)


class OtherHosts(Deployment):
    """The other hosts of the deployment, their scrapes, and the pods that are drained at any of them. Raises
    ConfigError if the library for the store is missing."""

    def __init__(
        self,
        settings: ReplicaSettings,
        fleet: Fleet,
        polling: Polling,
        clock: Clock,
        rng: Random,
        catalogue: Catalogue,
        configurations: Configurations,
        replica: Replica,
        received: Callable[[Packet], None] | None = None,
    ) -> None:
        """`received`: see `Deployment`."""
        check(settings)
        super().__init__(settings, clock, rng, catalogue, replica, lambda: configurations.of_deployment, received)
        self._fleet = fleet
        self._drains = SharedDrains(fleet.set_drained_by, replica.publish_to_all, fleet.has_pod)
        scrapes = SharedScrapes(replica, fleet, polling, clock, lambda: configurations.of_deployment)
        replica.state.put(drains=[self._drains], scrapes=[scrapes])
        fleet.watch(self._drains.added, self._drains.removed)

    def drained(self, endpoint: Endpoint) -> None:
        """Publish that a pod is drained at this host, or returned to service."""
        self._drains.turned(endpoint, self._fleet.drained_by(endpoint))


class Replicated(SharingApp):
    """The proxy of one process per host, in a deployment of several hosts."""

    def __init__(
        self, settings: Settings, registry: Registry | None = None, reader: ConfigReader | None = None
    ) -> None:
        self._id = new_id()
        super().__init__(settings, registry, reader)
        self.fleet.watch(self._replica.added, self._replica.removed)
        polling = self._process.polling
        assert polling is not None
        self._deployment = OtherHosts(
            settings.replicas,
            self.fleet,
            polling,
            self._clock,
            self._random,
            self._catalogue,
            self.configurations,
            self._replica,
        )
        self._replica.join(self._deployment)

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """Wait for the pods before joining, because sessions, breakers and scrapes of unknown pods are lost."""
        first_contact = await super()._know_the_fleet(stack)
        await stack.enter_async_context(self._deployment)
        stack.push_async_callback(self._replica.close)
        return first_contact

    def _drained(self, endpoint: Endpoint) -> None:
        self._deployment.drained(endpoint)

    def _replicas(self) -> Mapping[str, Any]:
        return self._deployment.status()


LONGEST_SCRAPE = 60.0
"""Seconds for which a scrape by another host counts at most."""


class SharedScrapes(Shared):
    """The scrapes of each pod by the first host that reaches it.

    The hosts have another order for each pod (rendezvous hashing). Each host publishes its scrapes, and does not scrape
    a pod for which it receives scrapes from a host before it in this order. So no agreement is needed: a pod is scraped
    by the first host that knows and reaches it, and by the next one when those scrapes stop.
    """

    kinds = (RecordKind.SCRAPE,)

    def __init__(
        self, replica: Replica, fleet: Fleet, polling: Polling, clock: Clock, config: Callable[[], str]
    ) -> None:
        """`config` returns the digest of the configuration in use. Hosts with another one may read other metrics."""
        self._replica = replica
        self._fleet = fleet
        self._polling = polling
        self._clock = clock
        self._config = config
        polling.scraped = self._scraped

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        match orjson.loads(body):
            case [str(name), int(priority), int(source), int(seconds) | float(seconds), int(checksum), list(ranks)]:
                scraped = [read_metrics(values, self._clock.now()) for values in ranks]
            case _:
                raise InvalidMessage("not a scrape of a pod")
        pod = self._fleet.get(name)
        if pod is None or priority <= self._priority(pod) or source != self._source(pod):
            return
        if refresher := self._polling.refresher_of(pod):
            refresher.receive(min(seconds, LONGEST_SCRAPE), checksum, scraped)

    def _scraped(self, pod: Endpoint, seconds: float, models_checksum: int) -> None:
        if self._replica.place[0] == 1:
            return  # there is no other host
        ranks = [metrics_values(rank, self._clock.now()) for rank in pod.ranks] if seconds else []
        scrape = pod.pod_name, self._priority(pod), self._source(pod), round(seconds, 3), models_checksum, ranks
        self._replica.publish_to_all(RecordKind.SCRAPE, dumped(scrape))

    def _priority(self, pod: Endpoint) -> int:
        """Return the priority of this host for a pod."""
        return xxh3_64_intdigest(self._replica.host + pod.pod_name.encode("utf-8", "surrogatepass")) >> 32

    def _source(self, pod: Endpoint) -> int:
        return crc32(f"{self._config()} {pod.url}".encode())
