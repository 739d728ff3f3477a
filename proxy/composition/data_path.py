"""The gateway and the port before it, made of all rooms that a request passes through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from proxy.composition.decisions import Decisions
from proxy.composition.doors import Doors
from proxy.composition.gates import Gates
from proxy.composition.observation import Observation
from proxy.composition.reliability import Reliability
from proxy.composition.senses import OwnSenses
from proxy.composition.warming import Warming
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange
from proxy.core.ports import Clock, Names, Random
from proxy.core.tasks import Tasks
from proxy.fleet.bindings import Bindings
from proxy.fleet.datastore import Fleet
from proxy.fleet.ledger import Ledger
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
from proxy.scheduling.scheduler import Scheduler
from proxy.settings import Settings
from proxy.telemetry.observer import Observer


@dataclass(slots=True)
class DataPath:
    """`gateway` and `server` are there from `begin` on; the server does not listen until it is told to."""

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
    clock: Clock
    random: Random
    observer: Observer = field(init=False)
    gateway: Gateway = field(init=False)
    server: DataServer = field(init=False)
    _hedges: Hedging | None = field(init=False, default=None)
    _made: dict[str, Pool] = field(init=False, default_factory=dict)
    _tasks: Tasks = field(init=False)

    async def begin(self, stack: AsyncExitStack, settings: Settings, names: Names | None) -> None:
        self.observer = self.observation.observer
        self.observer.stage_watcher = self.senses.stage_watcher
        self._tasks = await stack.enter_async_context(Tasks())
        self.gateway = self._make_gateway(settings, names, await stack.enter_async_context(BodyParser()))
        await self.warming.begin(stack, self.gateway, self.trust)
        self.server = await self._make_server(settings, stack)

    def change(self, settings: Settings, names: Names | None) -> None:
        """After all rooms have changed."""
        gateway, security, reliability = self.gateway, settings.security, settings.reliability
        gateway.hedging = self._hedging(settings, gateway.failover)
        gateway.follow(self._pools())
        gateway.failover.change(reliability.retries)
        if gateway.handoffs is not None:
            gateway.handoffs.change(settings.disaggregation, security.expose_endpoint)
        gateway.request_timeout = reliability.timeouts.request
        gateway.expose_endpoint = security.expose_endpoint
        gateway.ask_for_usage = settings.telemetry.ask_for_usage
        gateway.names = names
        gateway.resolver = self.gates.admission(self.doors.door, names)
        continued = reliability.continuation.models
        self.observer.stage_watcher = self.senses.stage_watcher
        self.server.change(security, reliability.timeouts, self.doors.door, self._at_first_byte(), continued)

    def turn_away(self) -> None:
        """From here on new requests are not wanted."""
        self.gateway.stopping = True
        self.server.settle()

    def _make_gateway(self, settings: Settings, names: Names | None, parser: BodyParser) -> Gateway:
        failover = self._make_failover()
        return Gateway(
            self.fleet,
            self._pools(),
            self.ledger,
            self.bindings,
            self.observer,
            self.clock,
            failover,
            self.reliability.breakers,
            handoffs=self._make_handoffs(settings, failover),
            hedging=self._hedging(settings, failover),
            request_timeout=settings.reliability.timeouts.request,
            expose_endpoint=settings.security.expose_endpoint,
            ask_for_usage=settings.telemetry.ask_for_usage,
            resolver=self.gates.admission(self.doors.door, names),
            names=names,
            parser=parser,
        )

    def _make_handoffs(self, settings: Settings, failover: Failover) -> HandOffs:
        return HandOffs(
            settings.disaggregation,
            failover,
            self.ledger,
            self.clock,
            self.random,
            self._tasks,
            self.observation.catalogue.handed_over.cell,
            settings.security.expose_endpoint,
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

    def _pools(self) -> list[Pool]:
        """Those that there were stay the same: requests wait in them."""
        schedulings, before = self.decisions.schedulings, self._made
        self._made = {}
        for name, scheduling in schedulings.items():
            pods, gates = pods_of(self.fleet, name, len(schedulings)), self.gates.of(name)
            pool = self._made[name] = before.get(name) or Pool(pods, scheduling, gates, name)
            pool.change(pods, scheduling, gates)
        return list(self._made.values())

    def _make_failover(self) -> Failover:
        return self.reliability.make_failover(
            self.ledger,
            lambda pod: self.server.pool.takes_connections(pod),
            self.gates.narrow,
            lambda request, pods: self._scheduler_of(pods[0]).schedule(request, pods).candidates(),
            self.observation.catalogue.continuations.cell().add,
        )

    def _scheduler_of(self, endpoint: Endpoint) -> Scheduler:
        return self.gateway.pools.having(endpoint).scheduling.scheduler

    async def _make_server(self, settings: Settings, stack: AsyncExitStack) -> DataServer:
        return DataServer(
            settings.listen,
            settings.security,
            settings.reliability.timeouts,
            self.gateway,
            self.clock,
            on_first_byte=self._at_first_byte(),
            on_end=await self.observation.recorded(stack),
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

    def _at_first_byte(self) -> Callable[[Exchange], None]:
        """Who is told of first bytes."""
        nobody_waits = not self.gates.flow_controls
        told = self._first_byte if nobody_waits else self._first_byte_makes_room
        return self.warming.seeing(self.senses.seeing(told))

    def _first_byte(self, exchange: Exchange) -> None:
        self.ledger.first_byte(exchange)
        if exchange.on_begun is not None:
            exchange.on_begun()
        if exchange.endpoint.is_watched:
            self.reliability.breakers.first_byte(exchange)
        self.observer.first_byte(exchange)

    def _first_byte_makes_room(self, exchange: Exchange) -> None:
        """Tokens whose prefill is over are not in flight."""
        self._first_byte(exchange)
        self.gates.look(exchange.endpoint.pool)
