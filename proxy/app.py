"""The composition root: everything is constructed here, in the order in which it starts."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from proxy import __version__, outbound
from proxy.autoscale.autoscaling import Autoscaling
from proxy.autoscale.signals import OwnSignals
from proxy.config.load import ConfigReader
from proxy.config.reload import Configurations, servable
from proxy.core.endpoint import DEFAULT_POOL, Endpoint
from proxy.core.errors import OutOfFiles, RequestError
from proxy.core.ports import Clock, KvEvents, Random, SystemClock, Timer, Tokenizers
from proxy.core.registry import Ports, Registry
from proxy.core.request import InferenceRequest
from proxy.core.state import Draft, State
from proxy.core.tasks import SystemTimer, Tasks
from proxy.dashboard.dashboard import Dashboard, of_process
from proxy.dry_run import OwnDecisions
from proxy.fleet.bindings import Bindings
from proxy.fleet.ledger import Ledger
from proxy.fleet.models import ModelReads
from proxy.fleet.rank_check import RankCheck
from proxy.fleet.records import SlowStart
from proxy.fleet.store import Fleet, PoolPods
from proxy.http.admin import AdminServer, admin_application
from proxy.http.admin_config import Explained
from proxy.http.guards import CloseReason
from proxy.http.server import DataServer
from proxy.http.settings import PodTlsContexts
from proxy.http.upstream.pool import PooledFetcher, UpstreamPool
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.polling import Polling
from proxy.prefix.exact import ExactIndex
from proxy.prefix.index import PrefixIndex
from proxy.prefix.kv_subscriptions import KvSubscriptions
from proxy.prefix.tokens import TokenSource
from proxy.reliability.breaker import Breakers
from proxy.reliability.health import Liveness, generates
from proxy.scheduling.build import Scheduling
from proxy.scheduling.explained_log import Explaining
from proxy.serving import Process, SchedulingBuilder, Serving, build_serving
from proxy.settings import PoolSettings, Settings, effective
from proxy.telemetry.logs import LogLevels
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Observation
from proxy.telemetry.observer import Observer
from proxy.telemetry.process import probe_loop_lag

if TYPE_CHECKING:
    from proxy.extproc.server import PickerServer

TOKEN_TIMEOUT = 5.0
"""Timeout, in seconds, for one token of an engine that stalled."""


class App:
    """The proxy, which serves inside `async with App(settings) as app`. The constructor raises ConfigError."""

    _workers = 1
    """Worker processes that serve together."""

    _decision_prefix = ""
    """The prefix of the ids of decisions."""

    _timer: Timer = SystemTimer()

    _server: DataServer
    """Created when the app is entered."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry | None = None,
        reader: ConfigReader | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`reader` parses configurations sent to the admin port."""
        clock, rng, catalogue = clock or SystemClock(), rng or random.Random(), Catalogue(__version__)
        self._settings, self._clock, self._random, self._catalogue = settings, clock, rng, catalogue
        self._stack = AsyncExitStack()
        self._levels = LogLevels(lambda: self._settings.telemetry.log_level)
        self.configurations = Configurations(
            settings, self, reader or ConfigReader(environ=os.environ), clock, catalogue
        )
        self.state = State(self._share)
        self.fleet = self._make_fleet()
        self.ledger = self._make_ledger()
        self.ledger.rank_check = RankCheck(clock, self.fleet.ranks_ignored, self.fleet.rank_refused)
        self._bindings = Bindings(self._clock)
        self._process = self._make_process(settings, registry)
        self._own_signals = self._process.signals
        self._observation = self._process.observation
        self.autoscaling = Autoscaling(
            settings.autoscale, settings.replicas, self.fleet, self._own_signals, catalogue, clock, rng
        )
        self._observation.readers.extend((self._read_queues, self._own_signals.read, self.autoscaling.read))
        self._dashboard = self._make_dashboard()
        self._picker: PickerServer | None = None
        self._is_stopping = False
        self._use(*self._build(settings))

    async def __aenter__(self) -> App:
        process, observation = self._process, self._observation
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(Tasks())
            await observation.start(stack, tasks, self._log_writer)
            for one in (process.tasks, process.parser, self._prober, process.liveness):
                await stack.enter_async_context(one)
            stack.push_async_callback(self.state.close)
            await self.state.finish_commit()
            known = await self._know_the_fleet(stack)
            self._make_server()
            session = await stack.enter_async_context(outbound.session(None, decompress=False))
            tasks.keep(lambda: probe_loop_lag(self._catalogue.loop_lag.cell(), self._clock), "event-loop-lag")
            await self._open_admin(stack, session)
            await self._listen(stack, known)
            await self._start_scaling(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let running streams end within the drain's grace, then stop everything in reverse order."""
        self._is_stopping = True
        await self._stack.aclose()

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """Serve with other settings, keeping state and requests in flight. Return the paths of changes that need a
        restart. Raise ConfigError, in which case nothing has changed."""
        before, (settings, left) = self._settings, servable(self._settings, wanted)
        serving, draft = self._build(settings)
        self._use(serving, draft)
        self._server.use(serving.data_port)
        if self._picker is not None:
            self._picker.renew()
        await self.state.finish_commit()
        self._levels.reload(before.telemetry.log_level)
        return left

    def check(self, wanted: Settings) -> Sequence[str]:
        """Return what `reload` would return. Raise ConfigError."""
        settings, left = servable(self._settings, wanted)
        self._build(settings)
        return left

    async def wait_for_balancers(self) -> None:
        """Report that the proxy is not ready, and serve new requests until load balancers can have noticed."""
        self._turn_away()
        await asyncio.sleep(self._settings.reliability.drain.settle)

    @property
    def observer(self) -> Observer:
        return self._observation.observer

    @property
    def breakers(self) -> Breakers:
        return self._process.breakers

    @property
    def serving(self) -> Serving:
        """The graph in use."""
        return self._process.serving

    def _build(self, settings: Settings) -> tuple[Serving, Draft]:
        """Return another graph that is not in use. Raise ConfigError."""
        draft = self.state.draft()
        serving = build_serving(settings, self._process, draft)
        draft.assign(self.autoscaling, settings=settings.autoscale)
        return serving, draft

    def _use(self, serving: Serving, draft: Draft) -> None:
        """Replace the graph in use in one step; requests that run or wait keep the one with which they started."""
        draft.commit()
        self._settings, self._process.serving = serving.settings, serving
        predictors = [one for each in self.schedulings.values() for one in each.plugins(PredictedLatencyProducer)]
        series = self._observation.endpoints
        series.indexes, series.exact, series.predictors = self._indexes(), self._exact_indexes(), predictors

    def _make_process(self, settings: Settings, registry: Registry | None) -> Process:
        clock, rng, fleet = self._clock, self._random, self.fleet
        pod_tls = PodTlsContexts(settings.pods.tls, lambda: fleet.endpoints, settings.pools_tls)
        self._prober = PooledFetcher(TOKEN_TIMEOUT, clock, pod_tls)
        breakers = Breakers(settings.reliability.breaker, clock, fleet, self._timer.call_later)
        observation = Observation(settings.telemetry, self._catalogue, fleet, clock, breakers.state)
        explaining = Explaining(lambda: fleet.endpoints, clock, rng, self._may_know_why, self._decision_prefix)
        polling = self._make_polling(pod_tls, observation)
        return Process(
            self.state,
            clock,
            self._timer,
            rng,
            fleet,
            self.ledger,
            self._bindings,
            pod_tls,
            UpstreamPool(settings.reliability.timeouts.connect, clock, pod_tls=pod_tls),
            breakers,
            Liveness(settings.reliability.health, clock, fleet, self._works),
            observation,
            explaining,
            SchedulingBuilder(registry, clock, self._ports, observation, explaining),
            OwnSignals(self._catalogue, fleet, clock, lambda: self.serving.flow_controls, lambda: self.schedulings),
            self._make_model_reads(polling),
            polling,
            self._workers,
        )

    def _make_server(self) -> None:
        cells = {why: self._catalogue.hung_up.cell(why.value) for why in CloseReason}  # a rate sees the first of each
        config, upstream = self.serving.data_port, self._process.upstream
        self._server = server = DataServer(
            self._settings.listen,
            config,
            self._clock,
            upstream,
            lambda why, number: cells[why].add(number),
        )
        self._picker = _picker_of(self._settings, server, self._process)

    async def _works(self, endpoint: Endpoint) -> bool | None:
        """Return whether the engine generates a token; None if the check cannot run."""
        try:
            return await generates(endpoint, self._prober, TOKEN_TIMEOUT, endpoint.rank)
        except OutOfFiles:
            return None

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def picker_port(self) -> int | None:
        """The port for Envoy; None if it is not configured."""
        return None if self._picker is None else self._picker.port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    @property
    def schedulings(self) -> Mapping[str, Scheduling]:
        return self.serving.schedulings

    @property
    def in_flight(self) -> int:
        """The number of requests in flight at this process."""
        return self.ledger.in_flight

    @property
    def index_bytes(self) -> int:
        """Return an upper bound of the memory of the prefix indexes, in bytes."""
        return sum(index.bytes for index in self._indexes()) + sum(index.bytes for index in self._exact_indexes())

    def _indexes(self) -> Sequence[PrefixIndex]:
        schedulings = self.schedulings.values()
        return [plugin.index for each in schedulings for plugin in each.plugins(ApproxPrefixCacheProducer)]

    def _exact_indexes(self) -> Sequence[ExactIndex]:
        schedulings = self.schedulings.values()
        return [plugin.index for each in schedulings for plugin in each.plugins(PrecisePrefixCacheProducer)]

    def effective(self) -> dict[str, Any]:
        """Return the configuration in effect: every value with its origin."""
        pools = {name: self._effective(name, pool) for name, pool in self._settings.pools.items()}
        return {**self._effective(DEFAULT_POOL, self._settings), "pools": pools}

    def _effective(self, pool: str, settings: Settings | PoolSettings) -> dict[str, Any]:
        return {**effective(settings), "scheduling": self.schedulings[pool].effective.as_dict()}

    def _make_dashboard(self) -> Dashboard:
        return Dashboard(
            self.fleet,
            self._clock,
            lambda endpoint: self._observation.endpoints.of(endpoint).attempts,
            self._process.breakers.state,
            of_process(self._catalogue),
            lambda: self.autoscaling.pools,
            lambda: {
                "config": self.configurations.described(),
                "workers": 1,
                "stopping": self._is_stopping,
            },
            lambda: self.schedulings,
            lambda: self.serving.flow_controls,
        )

    def _explained(self) -> Explained:
        return OwnDecisions(self._process)

    def _may_know_why(self, request: InferenceRequest) -> bool:
        """Return whether the client may see the decision: with an admin key, or without keys if pods are exposed."""
        if self.serving.authenticator is None:
            return self._settings.security.expose_endpoint
        try:
            return self.serving.authenticator.find(request.headers, "admin") is not None
        except RequestError:
            return False

    # Overridden in worker processes, whose supervisor has these.

    def _make_fleet(self) -> Fleet:
        return Fleet(
            self._clock,
            on_ready=self._ready,
            on_restarted=self._restarted,
            on_removed=self._removed,
            on_missed=self._missed,
            on_changed=self._capacity_freed,
            on_moved=self._moved,
            on_drained=self._drained,
            slow_start=self._make_slow_start(),
        )

    def _make_slow_start(self) -> SlowStart:
        return SlowStart(0.0, self._clock, self._random)

    def _make_ledger(self) -> Ledger:
        return Ledger(self._clock)

    def _share(self, key: Hashable, made_from: object, made: object) -> tuple[object, object]:
        """Share nothing of `State`: there is no other process."""
        return made, None

    def _ports(self, pool: str, draft: Draft) -> Ports:
        return {
            Clock: self._clock,
            Random: self._random,
            KvEvents: KvSubscriptions(pool, PoolPods(self.fleet, pool).watch, draft),
            Tokenizers: TokenSource(self._clock.wall, draft),
            Timer: self._timer,
        }

    def _make_polling(self, pod_tls: PodTlsContexts, observation: Observation) -> Polling | None:
        return Polling(self.fleet, pod_tls, self._clock, self._random, observation.endpoints.check_failed)

    def _make_model_reads(self, polling: Polling | None) -> ModelReads:
        assert polling is not None
        return polling

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """Start to poll the pods. Return a function that waits for the first contact."""
        polling = self._process.polling
        assert polling is not None
        await stack.enter_async_context(polling.tasks)
        return polling.first_contact

    async def _open_admin(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        application = admin_application(
            fleet=self.fleet,
            exposition=self._observation.exposition,
            config=self.effective,
            session=session,
            pod_tls=self._process.pod_tls,
            stopping=lambda: self._is_stopping,
            breaker=self._process.breakers.state,
            keys=lambda: (self._settings.admin.api_key, self.serving.authenticator),
            hosts=lambda: self._settings.admin.host_names,
            configurations=self.configurations,
            replicas=self._replicas,
            scaled=lambda: self.autoscaling.pools,
            dashboard=self._dashboard,
            explained=self._explained(),
            levels=self._levels,
        )
        self._admin = await stack.enter_async_context(
            AdminServer(self._settings.admin, application, self._settings.listen.send_timeout)
        )
        await self._dashboard.start(stack)

    async def _listen(self, stack: AsyncExitStack, known: Callable[[], Awaitable[object]]) -> None:
        """Accept connections at once: until a pod is ready, requests get a 503 with retry-after."""
        await self._server.start(self._sockets())
        stack.push_async_callback(self._stop_serving)
        if self._picker is not None:
            await self._picker.start(self._sockets_for_envoy())
        await known()

    async def _start_scaling(self, stack: AsyncExitStack) -> None:
        await self.autoscaling.start(stack)

    def _turn_away(self) -> None:
        """Report that new requests are not accepted."""
        self._is_stopping = True
        self._server.service.stopping = True  # close each connection after its response
        if self._picker is not None:
            self._picker.service.stopping = True

    async def _stop_serving(self, grace: float | None = None) -> None:
        """Stop the ports. Requests in flight have `grace` seconds to end, by default `reliability.drain.grace`."""
        ports = (self._server, self._picker)
        grace = self._settings.reliability.drain.grace if grace is None else grace
        await asyncio.gather(*(port.stop(grace) for port in ports if port is not None))

    def _read_queues(self) -> None:
        """Update the gauges before an exposition."""
        for control in self.serving.flow_controls.values():
            control.read_gauges()

    def _sockets(self) -> Sequence[socket.socket]:
        return ()

    def _sockets_for_envoy(self) -> Sequence[socket.socket]:
        return ()

    def _log_writer(self) -> Callable[[bytes], int]:
        return partial(os.write, sys.stdout.fileno())

    def _drained(self, endpoint: Endpoint) -> None:
        pass

    def _replicas(self) -> Mapping[str, Any]:
        """Return the status of the other proxies of the deployment."""
        return {}

    # Events of the fleet, passed to the packages that need them.

    def _ready(self, endpoint: Endpoint) -> None:
        self.ledger.level(endpoint, self.fleet.within(endpoint.pool).ready)
        self._warm(endpoint)

    def _restarted(self, endpoint: Endpoint) -> None:
        self._forget(endpoint)
        self._warm(endpoint)

    def _warm(self, endpoint: Endpoint) -> None:
        if (warmup := self.serving.warmups.get(endpoint.pool)) is not None:
            warmup.start(endpoint)

    def _capacity_freed(self, endpoint: Endpoint) -> None:
        """Let queued requests go on: the pod may have capacity again."""
        if (flow_control := self.serving.flow_controls.get(endpoint.pool)) is not None:
            flow_control.admit_waiting()

    def _removed(self, endpoint: Endpoint) -> None:
        self._forget(endpoint)
        self._process.upstream.forget(endpoint.url)

    def _missed(self, endpoint: Endpoint) -> None:
        self._observation.endpoints.scrape_failed(endpoint)

    def _moved(self, endpoint: Endpoint) -> None:
        self._observation.endpoints.moved(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        """Forget what was in the pod's memory: cached prefixes, stored responses."""
        for keeper in (self._bindings, self._process.breakers, self._process.liveness):
            keeper.forget(endpoint)
        scheduling = self.schedulings.get(endpoint.pool)
        if scheduling is not None:
            scheduling.forget(endpoint)


def _picker_of(settings: Settings, server: DataServer, process: Process) -> PickerServer | None:
    """Return the ext_proc server; None if its port is not configured. It shares the body budget, the listeners and the
    connections to pods with the data port."""
    if not settings.extproc.is_on:
        return None
    from proxy.extproc.server import PickerServer

    return PickerServer(settings.extproc, server, process.addresses)
