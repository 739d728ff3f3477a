"""The composition root: everything is constructed here, in the order in which it starts."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp

from proxy import __version__, outbound
from proxy.composition import picking
from proxy.composition.asking import Asking
from proxy.composition.autoscaling import Autoscaling
from proxy.composition.dashboard import Dashboard, of_process
from proxy.composition.data_path import DataPath
from proxy.composition.decisions import Decisions
from proxy.composition.doors import Doors
from proxy.composition.dry_run import DryRun, OwnDecisions
from proxy.composition.explaining import Explaining
from proxy.composition.gates import Gates
from proxy.composition.indexes import index_bytes, prefix_producers, session_headers
from proxy.composition.model_names import ModelNames
from proxy.composition.observation import Observation
from proxy.composition.reliability import Reliability
from proxy.composition.senses import OwnSenses
from proxy.composition.warming import Warming
from proxy.configurations import Configurations, Reader
from proxy.core.clock import SystemClock
from proxy.core.endpoint import DEFAULT_POOL, Endpoint
from proxy.core.errors import RequestError
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.differences import servable
from proxy.fleet.bindings import Bindings
from proxy.fleet.datastore import Fleet
from proxy.fleet.ledger import Ledger
from proxy.fleet.model_reads import ModelReads
from proxy.fleet.slow_start import SlowStart
from proxy.http.admin import admin_application
from proxy.http.admin_decisions import Explained
from proxy.http.admin_server import AdminServer
from proxy.http.upstream.trust import Trust
from proxy.models.resolver import Resolver
from proxy.pool_settings import PoolSettings
from proxy.prefix.index import PrefixIndex
from proxy.reliability.breaker import NOBODY, Company
from proxy.scheduling.build import Scheduling
from proxy.settings import Settings, effective
from proxy.telemetry import loop_lag
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.log_levels import LogLevels


class App:
    """`async with App(settings) as app`: inside of it the proxy serves. Raises ConfigError when constructed with
    settings whose scheduling cannot be built."""

    _workers = 1
    """That serve together."""

    _decision_prefix = ""
    """What the ids of its decisions begin with."""

    def __init__(self, settings: Settings, registry: Registry | None = None, reader: Reader | None = None) -> None:
        """`reader` makes settings of what the admin port is sent."""
        picking.check(settings.extproc)
        clock, rng, catalogue = SystemClock(), random.Random(), Catalogue(__version__)
        self._settings, self._clock, self._random, self._catalogue = settings, clock, rng, catalogue
        self._stack = AsyncExitStack()
        self._levels = LogLevels(lambda: self._settings.telemetry.log_level)
        self.configurations = Configurations(settings, self, reader or Reader(environ=os.environ), clock, catalogue)
        self.fleet = self._make_fleet()
        self.fleet.form(tuple(settings.all_pools))
        self.ledger = self._make_ledger()
        self._bindings = self._make_bindings()
        self._trust = trust = Trust(settings.pods.tls, lambda: self.fleet.endpoints, settings.pools_tls)
        self.reliability = Reliability(settings.reliability, self.fleet, trust, clock, rng, self._make_company())
        breakers = self.reliability.breakers
        self._observation = Observation(settings.telemetry, catalogue, self.fleet, clock, breakers.state)
        self.explaining = Explaining(self.fleet, clock, rng, self._may_know_why, self._decision_prefix)
        self._decisions = Decisions(settings, registry, clock, rng, self._observation, self.explaining)
        self._observation.follow(self.schedulings.values(), self._indexes())
        self._doors = Doors(settings.security, clock)
        self._asking = Asking(self.fleet, trust, clock, rng, self._observation.endpoints.check_failed)
        self._gates = Gates(settings, self._doors.door, self._workers, self.fleet, clock, rng, self._observation)
        self._names = ModelNames(self.fleet, trust, clock, rng, catalogue)
        self._warming = Warming(settings.all_pools, clock, rng)
        self._senses = OwnSenses(settings, self.fleet, catalogue, clock, self._gates, lambda: self.schedulings)
        self.autoscaling = Autoscaling(settings, self.fleet, self._senses, catalogue, clock, rng, self._cached_blocks)
        self._observation.readers.extend((self._senses.read, self.autoscaling.read))
        self._dashboard = self._make_dashboard()
        self._path = DataPath(
            self.fleet,
            self.ledger,
            self._bindings,
            trust,
            self.reliability,
            self._observation,
            self._decisions,
            self._doors,
            self._gates,
            self._warming,
            self._senses,
            self._make_model_reads(),
            clock,
            rng,
        )

    async def __aenter__(self) -> App:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(Tasks())
            self.observer = await self._observation.begin(stack, tasks, self._log_writer)
            await self.reliability.begin(stack)
            await self._doors.begin(stack)
            known = await self._know_the_fleet(stack)
            await self._decisions.begin(stack, self.fleet)
            names = await self._resolver(stack)
            await self._path.begin(stack, self._settings, names)
            session = await stack.enter_async_context(outbound.session(None, decompress=False))
            tasks.keep(lambda: loop_lag.probe(self._catalogue.loop_lag.cell(), self._clock), "event-loop-lag")
            await self._open_admin(stack, session)
            await self._listen(stack, known)
            await self._begin_scaling(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Streams that run are given the drain's grace; then everything stops, last started first."""
        self._path.gateway.stopping = True
        await self._stack.aclose()

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """Serves with other settings, keeping what is known and in flight; gives the paths of what can only be had by
        a restart, and stays as it was. Raises ConfigError, and nothing has changed then."""
        before, (settings, left) = self._settings, servable(self._settings, wanted)
        try:
            door = self._doors.door if settings.security == before.security else self._doors.make(settings.security)
            schedulings = self._decisions.build(settings, self.schedulings)  # last: plugins hand over what they know
        except Exception:
            await self._decisions.keep_what_is_used()
            raise
        self._settings, self._decisions.schedulings, self._doors.door = settings, schedulings, door
        self.explaining.follow(settings.telemetry.decisions)
        await self._change_rooms()
        self._share()
        await self._doors.follow()
        await self._warming.follow()
        await self._decisions.keep_what_is_used()
        await self._know_differently(before)
        if before.telemetry.log_level is not settings.telemetry.log_level:
            logging.getLogger().setLevel(settings.telemetry.log_level.name)
        return left

    def check(self, wanted: Settings) -> Sequence[str]:
        """What `reload` would give. Raises ConfigError."""
        settings, left = servable(self._settings, wanted)
        self._doors.make(settings.security)
        return left

    async def settle(self) -> None:
        """Says that new requests are not wanted, and serves those that come all the same until balancers have heard."""
        self._path.turn_away()
        await asyncio.sleep(self._settings.reliability.drain.settle)

    @property
    def port(self) -> int:
        return self._path.server.port

    @property
    def picker_port(self) -> int | None:
        """Where gateways ask; None if they may not."""
        return None if self._path.picker is None else self._path.picker.port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    @property
    def schedulings(self) -> Mapping[str, Scheduling]:
        """By pool."""
        return self._decisions.schedulings

    @property
    def index_bytes(self) -> int:
        """Upper bound of the memory of the prefix indexes."""
        return sum(map(index_bytes, self.schedulings.values()))

    def effective(self) -> dict[str, Any]:
        """The configuration in effect, every value with its origin."""
        pools = {name: self._effective(name, pool) for name, pool in self._settings.pools.items()}
        return {**self._effective(DEFAULT_POOL, self._settings), "pools": pools}

    def _effective(self, pool: str, settings: Settings | PoolSettings) -> dict[str, Any]:
        return {**effective(settings), "scheduling": self.schedulings[pool].effective.as_dict()}

    async def _change_rooms(self) -> None:
        """Nothing in it really waits: no request runs in between."""
        settings, breaker = self._settings, self._settings.reliability.breaker
        self.fleet.form(tuple(settings.all_pools))
        self._trust.change(settings.pods.tls, settings.pools_tls)
        self.fleet.change(breaker.panic_percent, breaker.slow_start)
        self.reliability.change(settings.reliability)
        self._observation.follow(self.schedulings.values(), self._indexes())
        self._gates.change(settings, self._doors.door)
        self._senses.change(settings)
        self._warming.change(settings.all_pools)
        self.autoscaling.change(settings)
        names = await self._resolver(self._stack)
        self._path.change(settings, names)

    async def _resolver(self, stack: AsyncExitStack) -> Resolver | None:
        sessions = session_headers(self.schedulings.values())
        return await self._names.resolver(stack, self._settings, sessions, bool(self._gates))

    def _make_dashboard(self) -> Dashboard:
        return Dashboard(
            self.fleet,
            self._clock,
            self._observation.endpoints.of,
            self.reliability.breakers.state,
            of_process(self._catalogue),
            lambda: self.autoscaling.pools,
            lambda: {
                "config": self.configurations.described(),
                "workers": 1,
                "stopping": self._path.gateway.stopping,
            },
            lambda: self.schedulings,
            lambda: self._gates.flow_controls,
        )

    def _explained(self) -> Explained:
        dry_run = DryRun(
            self.fleet,
            self._clock,
            self._decisions,
            self.explaining,
            lambda: self._path.gateway.pools,
            self._gates.narrow,
            lambda: self._names.current,
            lambda: {name: pool.scheduling for name, pool in self._settings.all_pools.items()},
        )
        return OwnDecisions(self.explaining, dry_run)

    def _may_know_why(self, request: InferenceRequest) -> bool:
        """Where keys are asked for, who could ask the admin port as well; else everybody, if pods have names at all."""
        if self._doors.door is None:
            return self._settings.security.expose_endpoint
        try:
            return self._doors.door.find(request.headers, "admin") is not None
        except RequestError:
            return False

    # What a process has of its own, and a worker among several has from its supervisor.

    def _make_fleet(self) -> Fleet:
        return Fleet(
            self._clock,
            on_ready=self._ready,
            on_restarted=self._restarted,
            on_removed=self._removed,
            on_missed=self._missed,
            on_changed=self._roomier,
            on_moved=self._moved,
            on_doubts=self._doubting,
            on_drained=self._drained,
            panic_percent=self._settings.reliability.breaker.panic_percent,
            slow_start=self._make_slow_start(),
        )

    def _make_slow_start(self) -> SlowStart:
        return SlowStart(self._settings.reliability.breaker.slow_start, self._clock, self._random)

    def _make_ledger(self) -> Ledger:
        return Ledger(self._clock)

    def _make_bindings(self) -> Bindings:
        return Bindings(self._clock)

    def _indexes(self) -> Sequence[PrefixIndex]:
        return [producer.index for scheduling in self.schedulings.values() for producer in prefix_producers(scheduling)]

    def _share(self) -> None:
        """Tells nobody."""

    def _make_model_reads(self) -> ModelReads:
        return self._asking

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """Begins to; what it returns waits until as much is known as requests need."""
        await self._asking.begin(stack, self._settings)
        return self._asking.first_contact

    async def _know_differently(self, before: Settings) -> None:
        await self._asking.change(before, self._settings)

    async def _open_admin(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        application = admin_application(
            fleet=self.fleet,
            exposition=self._observation.exposition,
            config=self.effective,
            session=session,
            trust=self._trust,
            stopping=lambda: self._path.gateway.stopping,
            breaker=self.reliability.breakers.state,
            keys=lambda: (self._settings.admin.api_key, self._doors.door),
            hosts=lambda: self._settings.admin.host_names,
            configurations=self.configurations,
            replicas=self._replicas,
            scaled=lambda: self.autoscaling.pools,
            dashboard=self._dashboard.routes,
            explained=self._explained(),
            levels=self._levels,
        )
        self._admin = await stack.enter_async_context(
            AdminServer(self._settings.admin, application, self._settings.listen.send_timeout)
        )
        await self._dashboard.begin(stack)

    async def _listen(self, stack: AsyncExitStack, known: Callable[[], Awaitable[object]]) -> None:
        """At once: while no pod is known, requests are told to come again, and connections are not refused."""
        await self._path.listen(self._sockets(), self._sockets_for_gateways())
        stack.push_async_callback(self._stop_serving)
        await known()

    async def _begin_scaling(self, stack: AsyncExitStack) -> None:
        await self.autoscaling.begin(stack)

    async def _stop_serving(self) -> None:
        await self._path.stop(self._settings.reliability.drain.grace)

    def _sockets(self) -> Sequence[socket.socket]:
        return ()

    def _sockets_for_gateways(self) -> Sequence[socket.socket]:
        return ()

    def _log_writer(self) -> Callable[[bytes], int]:
        return partial(os.write, sys.stdout.fileno())

    def _make_company(self) -> Company:
        """Nobody else has to know; nor below."""
        return NOBODY

    def _doubting(self, endpoint: Endpoint) -> None:
        pass

    def _drained(self, endpoint: Endpoint) -> None:
        pass

    def _replicas(self) -> Mapping[str, Any]:
        """What is known of the other proxies of the deployment."""
        return {}

    # What happens in one room and is known in another.

    def _cached_blocks(self, endpoint: Endpoint) -> int:
        return sum(index.blocks(endpoint) for index in self._indexes())

    def _ready(self, endpoint: Endpoint) -> None:
        self.ledger.level(endpoint, self.fleet.within(endpoint.pool).ready)
        self._warming.warm(endpoint)

    def _restarted(self, endpoint: Endpoint) -> None:
        self._forget(endpoint)
        self._warming.warm(endpoint)

    def _roomier(self, endpoint: Endpoint) -> None:
        """There may be room on the pod that was not there."""
        self._gates.look(endpoint.pool)

    def _removed(self, endpoint: Endpoint) -> None:
        self._forget(endpoint)
        self._path.server.pool.forget(endpoint)

    def _missed(self, endpoint: Endpoint) -> None:
        self.observer.scrape_failed(endpoint)

    def _moved(self, endpoint: Endpoint) -> None:
        self._observation.endpoints.moved(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        """What was in the pod's memory: cached prefixes, stored responses."""
        self._bindings.forget(endpoint)
        self.reliability.forget(endpoint)
        scheduling = self.schedulings.get(endpoint.pool)
        if scheduling is not None:
            scheduling.forget(endpoint)
