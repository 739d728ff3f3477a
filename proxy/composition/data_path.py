"""The gateway and the port before it, made of all rooms that a request passes through."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.composition.decisions import Decisions
from proxy.composition.doors import Doors
from proxy.composition.gates import Gates
from proxy.composition.observation import Observation
from proxy.composition.picking import picker_of
from proxy.composition.reliability import Reliability
from proxy.composition.senses import OwnSenses
from proxy.composition.warming import Warming
from proxy.core.endpoint import Endpoint
from proxy.core.listener import Listener, Listeners
from proxy.core.ports import Clock, Names, Random
from proxy.core.tasks import Tasks
from proxy.disagg.settings import DisaggregationSettings
from proxy.fleet.bindings import Bindings
from proxy.fleet.datastore import Fleet
from proxy.fleet.ledger import Ledger
from proxy.fleet.model_reads import ModelReads, ReadsAfterNotFound
from proxy.fleet.pool_pods import pods_of
from proxy.gateway import Gateway
from proxy.handoff.hand_off import HandOffs
from proxy.http.hung_up import HungUp, Tell
from proxy.http.server import DataServer
from proxy.http.upstream.trust import Trust
from proxy.parsing.reader import BodyParser
from proxy.pool import Pool
from proxy.reliability.failover import Failover
from proxy.reliability.hedging import Hedging
from proxy.scheduling.scheduler import Schedules
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.extproc.server import Picker


@dataclass(slots=True)
class DataPath:
    """`gateway` and `server` are there from `begin` on; nobody listens until told to."""

    fleet: Fleet
    ledger: Ledger
    bindings: Bindings
    trust: Trust
    reliability: Reliability
    observation: Observation
    decisions: Decisions
    doors: Doors
    gates: Gates
    warming: Warming
    senses: OwnSenses
    model_reads: ModelReads
    clock: Clock
    random: Random
    gateway: Gateway = field(init=False)
    server: DataServer = field(init=False)
    picker: Picker | None = field(init=False, default=None)
    """Where gateways ask, if they may."""
    _hedges: Hedging | None = field(init=False, default=None)
    _made: dict[str, Pool] = field(init=False, default_factory=dict)
    _tasks: Tasks = field(init=False)
    _observers: list[Listener] = field(init=False)
    """Metrics, and what else is told of all requests."""
    _listeners: Listeners = field(init=False)
    _failover: Failover = field(init=False)

    async def begin(self, stack: AsyncExitStack, settings: Settings, names: Names | None) -> None:
        self._tasks = await stack.enter_async_context(Tasks())
        self._observers = await self.observation.listeners(stack)
        self._failover = self._make_failover()
        self._listeners = self._make_listeners()
        self.gateway = self._make_gateway(settings, names, await stack.enter_async_context(BodyParser()))
        await self.warming.begin(stack, self.gateway, self.trust)
        self.server = await self._make_server(settings, stack)
        addresses, door = self.gates.addresses, self.doors.door
        self.picker = picker_of(settings, self.server, self.gateway, door, addresses, self.clock)

    def change(self, settings: Settings, names: Names | None) -> None:
        """After all rooms have changed."""
        gateway, security, reliability = self.gateway, settings.security, settings.reliability
        self._listeners = self._make_listeners()
        gateway.hedging = self._hedging(settings, gateway.failover)
        gateway.follow(self._pools(settings, gateway.failover))
        gateway.failover.change(reliability.retries)
        gateway.request_timeout = reliability.timeouts.request
        gateway.expose_endpoint = security.expose_endpoint
        gateway.ask_for_usage = settings.telemetry.ask_for_usage
        gateway.names = names
        gateway.resolver = self.gates.admission(self.doors.door, names)
        continued = reliability.continuation.models
        self.server.service.listeners = self._listeners
        self.server.change(security, reliability.timeouts, self.doors.door, continued)
        if self.picker is not None:
            self.picker.service.change(security, self.doors.door)
            self.picker.service.listeners = self._listeners

    async def listen(self, sockets: Sequence[socket.socket], for_gateways: Sequence[socket.socket]) -> None:
        """On these; on the ports of the settings where there are none. Raises OSError."""
        await self.server.start(sockets)
        if self.picker is None:
            return
        try:
            await self.picker.start(for_gateways)
        except OSError:
            await self.server.stop(0.0)
            raise

    async def stop(self, grace: float) -> None:
        """Requests in flight have `grace` seconds to end."""
        stopping = [self.server.stop(grace), *([] if self.picker is None else [self.picker.stop(grace)])]
        await asyncio.gather(*stopping)

    def turn_away(self) -> None:
        """From here on new requests are not wanted."""
        self.gateway.stopping = True
        self.server.settle()
        if self.picker is not None:
            self.picker.service.stopping = True

    def _make_gateway(self, settings: Settings, names: Names | None, parser: BodyParser) -> Gateway:
        failover = self._failover
        return Gateway(
            self.fleet,
            self._pools(settings, failover),
            self.bindings,
            self.clock,
            failover,
            hedging=self._hedging(settings, failover),
            request_timeout=settings.reliability.timeouts.request,
            expose_endpoint=settings.security.expose_endpoint,
            ask_for_usage=settings.telemetry.ask_for_usage,
            resolver=self.gates.admission(self.doors.door, names),
            names=names,
            model_reads=self.model_reads,
            parser=parser,
        )

    def _make_handoffs(self, settings: DisaggregationSettings, failover: Failover) -> HandOffs:
        return HandOffs(
            settings,
            failover,
            self.ledger,
            self.clock,
            self.random,
            self._tasks,
            self.observation.catalogue.handed_over.cell,
        )

    def _hedging(self, settings: Settings, failover: Failover) -> Hedging | None:
        """None where nobody gets a second leg. What is known of first bytes stays."""
        wanted = settings.reliability.hedging
        if wanted is not None and self._hedges is None:
            counted = self.observation.catalogue.hedges.cell
            self._hedges = Hedging(wanted, failover, self.clock, lambda: self.ledger.entered, counted)
        elif wanted is not None and self._hedges is not None:
            self._hedges.change(wanted)
        return None if wanted is None else self._hedges

    def _pools(self, settings: Settings, failover: Failover) -> list[Pool]:
        """Those that there were stay the same: requests wait in them."""
        schedulings, before = self.decisions.schedulings, self._made
        self._made = {}
        for name, scheduling in schedulings.items():
            pods, gates = pods_of(self.fleet, name, len(schedulings)), self.gates.of(name)
            pool = self._made[name] = before.get(name) or Pool(pods, scheduling, gates, name)
            pool.change(pods, scheduling, gates, self._listeners)
            disaggregation = settings.all_pools[name].disaggregation
            pool.handoffs = pool.handoffs or self._make_handoffs(disaggregation, failover)
            pool.handoffs.change(disaggregation, settings.security.expose_endpoint)
        return list(self._made.values())

    def _make_failover(self) -> Failover:
        return self.reliability.make_failover(
            self.ledger,
            lambda pod: self.server.pool.takes_connections(pod),
            self.gates.narrow,
            lambda request, pods: self._scheduler_of(pods[0]).schedule(request, pods).candidates(),
            self.observation.catalogue.continuations.cell().add,
        )

    def _scheduler_of(self, endpoint: Endpoint) -> Schedules:
        return self.gateway.pools.having(endpoint).scheduling.scheduler

    async def _make_server(self, settings: Settings, stack: AsyncExitStack) -> DataServer:
        return DataServer(
            settings.listen,
            settings.security,
            settings.reliability.timeouts,
            self.gateway,
            self.clock,
            listeners=self._listeners,
            takes=self.gateway.failover.takes,
            trust=self.trust,
            given_up=self.reliability.liveness.given_up,
            door=self.doors.door,
            continued=settings.reliability.continuation.models,
            hung_up=self._counted_hang_ups(),
        )

    def _counted_hang_ups(self) -> Tell:
        """All reasons are shown from the start on, so that a rate sees the first."""
        cells = {why: self.observation.catalogue.hung_up.cell(why.value) for why in HungUp}
        return lambda why, number: cells[why].add(number)

    def _make_listeners(self) -> Listeners:
        """Those of all pools. The ledger is first: gates and hooks read what an attempt costs."""
        kept = self.decisions.explaining.kept
        reliability = (self.reliability.breakers, self._failover.poison, ReadsAfterNotFound(self.model_reads))
        explained = () if kept is None else (kept,)
        collectors: list[Listener] = [each for each in (self.senses, self.warming) if each]
        return Listeners([self.ledger, *reliability, self.bindings, *explained, *self._observers, *collectors])
