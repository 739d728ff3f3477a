"""Build the graph that serves requests under one configuration, around what survives a reload."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from proxy import outbound
from proxy.auth.authenticator import Authenticator, AuthorizingResolver, authenticator_of
from proxy.autoscale.signals import OwnSignals
from proxy.core.attempt import Attempt
from proxy.core.decision import Decision, DecisionRecord, DecisionSampler
from proxy.core.endpoint import Endpoint
from proxy.core.errors import RequestError, without_extra
from proxy.core.listener import Listener, Listeners
from proxy.core.ports import Admission, Clock, Random, Timer
from proxy.core.registry import PluginFaults, Ports, Registry
from proxy.core.request import InferenceRequest
from proxy.core.state import Draft, State
from proxy.core.tasks import Tasks
from proxy.extproc.settings import ExtProcSettings
from proxy.fleet.bindings import Bindings
from proxy.fleet.ledger import Ledger
from proxy.fleet.models import ModelReads, ReadsAfterNotFound
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.store import Fleet, PoolPods, pods_of
from proxy.gateway import Gateway
from proxy.http.rank import RankAdmission
from proxy.http.server import DataPortConfig
from proxy.http.settings import PodTlsContexts, SecuritySettings
from proxy.http.upstream.pool import PooledFetcher, UpstreamPool
from proxy.latency.forecast import LATENCY
from proxy.models.resolver import Resolver, Waker
from proxy.models.settings import ModelSettings, Wake
from proxy.parsing import BodyParser
from proxy.plugins.producers.agent_identity import AgentIdentity
from proxy.polling import Polling, fleet_settings
from proxy.pool import Pool
from proxy.reliability.breaker import Breakers
from proxy.reliability.failover import Failover, Narrow, Quarantine, RetryBudget
from proxy.reliability.health import Liveness
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import Document
from proxy.scheduling.explained_log import DecisionLog, Explaining
from proxy.settings import Settings
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Observation
from proxy.telemetry.observer import Observer

if TYPE_CHECKING:
    from proxy.auth.limits import RateLimiter
    from proxy.disagg.transfer import SplitRequests
    from proxy.extproc.addresses import Addresses
    from proxy.fleet.warmup import SharedPrompts, Warmup
    from proxy.flowcontrol.controller import FlowControl
    from proxy.reliability.hedging import Hedging


class SchedulingBuilder:
    """Builds the schedulings of all pools. `ports` returns what the plugins of a pool use."""

    def __init__(
        self,
        registry: Registry | None,
        clock: Clock,
        ports: Callable[[str, Draft], Ports],
        observation: Observation,
        explaining: Explaining,
    ) -> None:
        self.explaining = explaining
        self._registry = registry or Registry.discover()
        self._ports = ports
        self._faults = PluginFaults(clock, lambda *fault: observation.observer.plugin_fault(*fault))

    def build(self, settings: Settings, draft: Draft) -> dict[str, Scheduling]:
        """Return the scheduling of every pool. Raise ConfigError with every fault."""
        return {
            name: build(pool.scheduling, self._registry, self._ports(name, draft), self._faults, draft, name)
            for name, pool in settings.all_pools.items()
        }

    def imagined(self, pool: str, document: Document, draft: Draft) -> Scheduling:
        """Build the scheduling of a document in place of the pool's own. Plugins with equal parameters are shared;
        other plugins start without state. Discard the draft after use. Raise ConfigError."""
        return build(document, self._registry, self._ports(pool, draft), draft=draft, pool=pool, keeps_state=False)


class Shadows(Listener):
    """The listener that counts what shadow profiles would have chosen."""

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


ISSUER_TIMEOUT = 5.0
"""Timeout, in seconds, for the JWKS of a token issuer."""

LARGEST_KEYS = 4 << 20
"""Largest JWKS, in bytes."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The graph of one configuration. Mappings are by pool. `limits` is None without limits, `resolver` with
    default `models` and without admissions."""

    settings: Settings
    authenticator: Authenticator | None
    limits: RateLimiter | None
    flow_controls: Mapping[str, FlowControl]
    warmups: Mapping[str, Warmup]
    schedulings: Mapping[str, Scheduling]
    resolver: Resolver | None
    gateway: Gateway
    data_port: DataPortConfig


@dataclass
class Process:
    """What a process makes once, before its first configuration. A reload replaces `serving`, the graph in use."""

    state: State
    clock: Clock
    timer: Timer
    random: Random
    fleet: Fleet
    ledger: Ledger
    bindings: Bindings
    pod_tls: PodTlsContexts
    upstream: UpstreamPool
    breakers: Breakers
    liveness: Liveness
    observation: Observation
    explaining: Explaining
    scheduling_builder: SchedulingBuilder
    signals: OwnSignals
    model_reads: ModelReads
    polling: Polling | None
    """None if another process polls the pods."""
    workers: int = 1
    """Number of processes that serve together."""
    parser: BodyParser = field(default_factory=BodyParser)
    tasks: Tasks = field(default_factory=Tasks)
    serving: Serving = field(init=False)

    @cached_property
    def addresses(self) -> Addresses:
        """Addresses of pods, as Envoy knows them."""
        from proxy.extproc.addresses import Addresses

        return Addresses(self.clock)

    @property
    def catalogue(self) -> Catalogue:
        return self.observation.catalogue


def build_serving(settings: Settings, process: Process, draft: Draft) -> Serving:
    """Return the graph of a configuration. Nothing in use changes before the draft is committed. Raise ConfigError."""
    return _Build(settings, process, draft).serving()


def build_authenticator(security: SecuritySettings, clock: Clock, draft: Draft) -> Authenticator | None:
    """Return None if no credentials are required. Raise ConfigError."""
    return authenticator_of(security, clock, os.environ, _fetch_keys, draft)


async def _fetch_keys(url: str) -> tuple[int, bytes]:
    response = await outbound.fetch("GET", url, ISSUER_TIMEOUT, limit=LARGEST_KEYS, allow_redirects=False)
    return response.status, response.body


class _Build:
    """The parts of a graph, in the order in which they are built. Modules that few configurations need are imported
    where a section needs them."""

    def __init__(self, settings: Settings, process: Process, draft: Draft) -> None:
        self.settings = settings
        self.process = process
        self.draft = draft

    def serving(self) -> Serving:
        settings, process, draft = self.settings, self.process, self.draft
        names = settings.all_pools
        _check_extra(settings.extproc)
        draft.assign(process.fleet, settings=fleet_settings(settings, process.polling is not None))
        draft.assign(process.pod_tls, default=settings.pods.tls, pools=settings.pools_tls)
        draft.assign(process.breakers, settings=settings.reliability.breaker)
        draft.assign(process.liveness, settings=settings.reliability.health)
        draft.assign(process.signals, pools=settings.autoscale.pools)
        explained_log = self._explained_log()
        self.authenticator = build_authenticator(settings.security, process.clock, draft)
        self.limits = self._limits()
        self.flow_controls = {name: control for name in names if (control := self._flow_control(name)) is not None}
        self.admissions = {name: self._admissions(name) for name in names}
        self.prompts, warmups = self._warmups()
        if process.polling is not None:
            process.polling.build(settings, draft)
        self.schedulings = process.scheduling_builder.build(settings, draft)
        self.resolver = self._resolver()
        self.failover = self._failover()
        self.explained = None
        if explained_log is not None:
            self.explained = process.explaining.listener(self.schedulings, explained_log)
        self.listeners = self._listeners()
        self.gateway = self._gateway()
        return Serving(
            settings,
            self.authenticator,
            self.limits,
            self.flow_controls,
            warmups,
            self.schedulings,
            self.resolver,
            self.gateway,
            self._data_port(),
        )

    # Admission.

    def _limits(self) -> RateLimiter | None:
        authenticator = self.authenticator
        if authenticator is None or not authenticator.has_limits:
            return None
        from proxy.auth.limits import LimitSeries, RateLimiter

        limits, tenants, series = authenticator.limits, authenticator.tenants, LimitSeries(self.process.catalogue)
        made = partial(RateLimiter, limits, tenants, self.process.clock, series.limited)
        return self.draft.get_and_assign("limits", made, limits=limits, tenants=tenants)

    def _flow_control(self, pool: str) -> FlowControl | None:
        """Return None if no request ever waits."""
        process, wanted = self.process, self.settings.all_pools[pool].flow_control
        settings = wanted.part(process.workers)
        if not wanted.limits:
            return None
        from proxy.flowcontrol.controller import FlowControl, FlowSeries

        pods, series = PoolPods(process.fleet, pool), FlowSeries(process.catalogue, pool)
        made = partial(FlowControl, settings, pods, process.clock, series)
        return self.draft.get_and_assign(("flow-control", pool), made, settings=settings)

    def _admissions(self, pool: str) -> Sequence[Admission]:
        process, settings = self.process, self.settings.all_pools[pool].flow_control
        subset = shedding = None
        if self.settings.extproc.is_on:
            from proxy.extproc.addresses import SubsetAdmission

            subset = SubsetAdmission(process.addresses)
        ranks = RankAdmission() if self.settings.security.client_ranks else None
        if settings.sheds:
            from proxy.flowcontrol.controller import FlowSeries, LoadShedding

            shedding = LoadShedding(
                settings, PoolPods(process.fleet, pool), process.random, FlowSeries(process.catalogue, pool)
            )
        admissions = (self.limits, subset, ranks, shedding, self.flow_controls.get(pool))
        return [admission for admission in admissions if admission is not None]

    def _explained_log(self) -> DecisionLog | None:
        """Return None if decisions are not kept."""
        explaining, draft, wanted = self.process.explaining, self.draft, self.settings.telemetry.decisions
        log = None
        if wanted is not None:
            made = partial(DecisionLog, wanted, self.process.clock, explaining.prefix)
            log = draft.get_and_assign("decision-log", made, settings=wanted)
        draft.assign(explaining, log=log)
        return log

    # Models.

    def _resolver(self) -> Resolver | None:
        process, draft, settings, cluster = self.process, self.draft, self.settings.models, None
        if (wanted := settings.kubernetes) is not None:
            from proxy.models.cluster import ClusterNames

            cluster = draft.get("cluster-names", partial(ClusterNames, wanted, process.clock, process.random), wanted)
        if settings == ModelSettings() and not any(self.admissions.values()):
            return None
        waker = self._waker(settings.wake) if settings.wake.enabled else None
        pools = tuple(self.settings.all_pools)
        resolver = Resolver(
            settings if cluster is None else cluster.added_to(settings),
            process.random,
            process.catalogue,
            waker,
            pools if len(pools) > 1 else (),
            session_headers(self.schedulings.values()),
        )
        if cluster is not None:
            draft.assign(cluster, changed=lambda: setattr(resolver, "settings", cluster.added_to(settings)))
        return resolver

    def _waker(self, settings: Wake) -> Waker:
        process, draft, timeout = self.process, self.draft, settings.timeout
        fetcher = partial(PooledFetcher, timeout, process.clock, process.pod_tls)
        poster = draft.get_and_assign("wake-connections", fetcher, timeout=timeout)
        tasks = draft.get("wake-tasks", Tasks)
        return draft.get_and_assign(
            "waker", partial(Waker, process.fleet, poster, process.clock, tasks, timeout), timeout=timeout
        )

    # Prompts that warm pods up.

    def _warmups(self) -> tuple[Mapping[str, SharedPrompts], Mapping[str, Warmup]]:
        prompts, warmups = {}, {}
        for name, pool in self.settings.all_pools.items():
            if pool.pods.warmup.prompts:
                prompts[name], warmups[name] = self._warmup(name, pool.pods.warmup)
        return prompts, warmups

    def _warmup(self, pool: str, settings: WarmupSettings) -> tuple[SharedPrompts, Warmup]:
        from proxy.fleet.warmup import TIMEOUT, SharedPrompts, Warmup
        from proxy.warmup_sender import WarmupSender

        process, draft = self.process, self.draft
        shared = partial(SharedPrompts, settings, process.clock)
        prompts = draft.get_and_assign(("shared-prompts", pool), shared, settings=settings)
        poster = draft.get(
            ("warmup-connections", pool), partial(PooledFetcher, TIMEOUT, process.clock, process.pod_tls)
        )
        sender = WarmupSender(lambda: process.serving.gateway, poster, process.clock)
        made = partial(Warmup, settings, prompts, sender.send, process.clock, process.random)
        return prompts, draft.get(("warmup", pool), made, settings)

    # The path of requests.

    def _pool(self, name: str, scheduling: Scheduling) -> Pool:
        pods = pods_of(self.process.fleet, name, len(self.schedulings))
        split_requests = self._split_requests(name) if scheduling.scheduler.may_split else None
        return Pool(pods, scheduling, self.admissions[name], name, split_requests, self.listeners)

    def _split_requests(self, pool: str) -> SplitRequests:
        from proxy.disagg.transfer import SplitRequests

        process = self.process
        return SplitRequests(
            self.settings.all_pools[pool].disaggregation,
            self.failover,
            process.ledger,
            process.clock,
            process.random,
            process.tasks,
            process.catalogue.disagg_requests.cell,
            self.settings.security.expose_endpoint,
        )

    def _failover(self) -> Failover:
        process, draft, retries = self.process, self.draft, self.settings.reliability.retries
        fleet, clock, percent, schedulings = process.fleet, process.clock, retries.budget_percent, self.schedulings
        made = partial(RetryBudget, percent, clock, lambda: process.ledger.entered)
        budget = draft.get_and_assign("retry-budget", made, percent=percent)
        first = next(iter(schedulings.values()))

        def others(attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
            """Return ready pods that were no candidates of the decision."""
            request, pool = attempt.request, attempt.endpoint.pool
            pods: Sequence[Endpoint] = [
                pod
                for pod in fleet.ready
                if pod.pool == pool and pod not in tried and (not pod.models or request.model in pod.models)
            ]
            if not pods:
                return ()
            try:
                for admission in self.admissions.get(pool, ()):
                    if admission.holds_for_retries:
                        pods = admission.narrow(request, pods)
                return schedulings.get(pool, first).scheduler.schedule(request, pods).candidates()
            except RequestError:
                return ()

        return Failover(
            retries,
            clock,
            process.random,
            budget,
            draft.get("quarantine", lambda: Quarantine(clock, process.upstream.takes_connections, process.tasks)),
            process.timer.sleep,
            narrowing(self.flow_controls),
            others,
            process.catalogue.continuations.cell().add,
        )

    def _hedging(self) -> Hedging | None:
        """Return None if requests are not hedged."""
        process, draft, wanted = self.process, self.draft, self.settings.reliability.hedging
        if wanted is None:
            return None
        from proxy.reliability.hedging import SAVED_UP, HedgeDelays, Hedging

        clock, percent = process.clock, wanted.budget_percent
        delays = draft.get_and_assign("hedge-delays", partial(HedgeDelays, wanted), settings=wanted)
        made = partial(RetryBudget, percent, clock, lambda: process.ledger.entered, per_second=0.0, most=SAVED_UP)
        budget = draft.get_and_assign("hedging-budget", made, percent=percent)
        return Hedging(wanted, self.failover, clock, delays, budget, process.catalogue.hedges.cell)

    def _gateway(self) -> Gateway:
        process, settings, limits = self.process, self.settings, self.limits
        resolver: AuthorizingResolver | Resolver | None = self.resolver
        if self.authenticator is not None:
            resolver = AuthorizingResolver(self.resolver, None if limits is None else limits.counts_tokens)
        wants = None if self.explained is None else self.explained.wants
        return Gateway(
            process.fleet,
            [self._pool(*named) for named in self.schedulings.items()],
            process.bindings,
            process.clock,
            self.failover,
            hedging=self._hedging(),
            request_timeout=settings.reliability.timeouts.request,
            expose_endpoint=settings.security.expose_endpoint,
            ask_for_usage=settings.telemetry.ask_for_usage,
            resolver=resolver,
            model_names=self.resolver,
            model_reads=process.model_reads,
            sampler=DecisionSampler(process.observation.observer.plugin_timed, wants),
            parser=process.parser,
        )

    def _data_port(self) -> DataPortConfig:
        process, settings = self.process, self.settings
        return DataPortConfig(
            self.gateway,
            settings.security,
            settings.reliability.timeouts,
            self.listeners,
            retries_instead=self.failover.retries_instead,
            reason_to_give_up=process.liveness.reason_to_give_up,
            authenticator=self.authenticator,
            continuable_models=settings.reliability.continuation.models,
        )

    def _listeners(self) -> Listeners:
        """Return the listeners of all pools. The ledger is first: admissions and hooks read `attempt.charge`."""
        process = self.process
        has_shadows = any(profile.shadow for one in self.schedulings.values() for profile in one.effective.profiles)
        listeners: list[Listener | None] = [
            process.ledger,
            process.breakers,
            self.failover.quarantine,
            ReadsAfterNotFound(process.model_reads),
            process.bindings,
            self.explained,
            *process.observation.listeners,
            Shadows(process.observation.observer) if has_shadows else None,
            process.signals if self.settings.autoscale.pools else None,
            _Prompts(self.prompts) if self.prompts else None,
        ]
        return Listeners([listener for listener in listeners if listener is not None])


def session_headers(schedulings: Iterable[Scheduling]) -> tuple[str, ...]:
    """Return the headers that identify sessions of agents; empty unless a pool has the plugin."""
    found = (plugin.headers for scheduling in schedulings for plugin in scheduling.plugins(AgentIdentity))
    return tuple(dict.fromkeys(header for headers in found for header in headers))


def _check_extra(settings: ExtProcSettings) -> None:
    """Raise ConfigError if the port for gateways is configured and its packages are missing."""
    try:
        if settings.is_on:
            importlib.import_module("proxy.extproc.server")
    except ImportError:
        raise without_extra("extproc.port", "extproc") from None


class _Prompts(Listener):
    """The listener that collects prompts of successful responses for warm-ups."""

    def __init__(self, pools: Mapping[str, SharedPrompts]) -> None:
        self._pools = pools

    def first_byte(self, attempt: Attempt) -> None:
        shared = self._pools.get(attempt.endpoint.pool)
        if shared is not None and attempt.status is not None and attempt.status < 300:
            shared.see(attempt.request)


def narrowing(flow_controls: Mapping[str, FlowControl]) -> Narrow:
    """Return a function that keeps the pods with free capacity, of pods of one pool."""

    def narrow(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        flow_control = flow_controls.get(endpoints[0].pool)
        return endpoints if flow_control is None else flow_control.narrow(request, endpoints)

    return narrow
