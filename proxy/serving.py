"""Build the graph that serves requests under one configuration, around what survives a reload."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy import outbound
from proxy.auth.authenticator import Admission, Authenticator, authenticator_of
from proxy.autoscale.signals import OwnSignals
from proxy.core.attempt import Attempt
from proxy.core.decision import Decision, DecisionRecord, DecisionRecorder
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Problem, RequestError
from proxy.core.listener import Listener, Listeners
from proxy.core.ports import Clock, Gate, Random, Timer
from proxy.core.registry import PluginFaults, Ports, Registry
from proxy.core.request import InferenceRequest
from proxy.core.state import Draft, State
from proxy.core.tasks import Tasks
from proxy.disagg.transfer import SplitRequests
from proxy.extproc.addresses import Addresses, SubsetGate
from proxy.extproc.settings import ExtProcSettings
from proxy.fleet.bindings import Bindings
from proxy.fleet.ledger import Ledger
from proxy.fleet.models import ModelReads, ReadsAfterNotFound
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.store import Fleet, PoolPods, pods_of
from proxy.flowcontrol.controller import FlowControl, FlowSeries, SheddingGate
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.gateway import Gateway
from proxy.http.rank import RankGate
from proxy.http.server import ServedGraph
from proxy.http.settings import PodTlsContexts, SecuritySettings
from proxy.http.upstream.pool import PooledFetcher, UpstreamPool
from proxy.latency.forecast import LATENCY
from proxy.models.resolver import ModelSeries, Resolver, Waker
from proxy.models.settings import ModelSettings, Wake
from proxy.parsing import BodyParser
from proxy.plugins.producers.agent_identity import AgentIdentity
from proxy.polling import Polling, fleet_settings
from proxy.pool import Pool
from proxy.reliability.breaker import Breakers
from proxy.reliability.failover import Failover, Narrow, Poison, RetryBudget
from proxy.reliability.health import Liveness
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import Document
from proxy.scheduling.explained_log import DecisionLog, Explained, Explaining
from proxy.settings import Settings
from proxy.telemetry.observation import Observation
from proxy.telemetry.observer import Observer

if TYPE_CHECKING:
    from proxy.auth.limits import RateLimiter
    from proxy.fleet.warmup import SharedPrompts, Warmup
    from proxy.models.cluster import ClusterNames
    from proxy.reliability.hedging import Hedging


class Decisions:
    """Builds the schedulings of all pools. `schedulings` are in use, by pool. `ports` returns what the plugins of a
    pool use."""

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
        self.schedulings: Mapping[str, Scheduling] = {}

    def build(self, settings: Settings, draft: Draft) -> dict[str, Scheduling]:
        """Return the scheduling of every pool. Raise ConfigError with every fault."""
        return {
            name: build(pool.scheduling, self._registry, self._ports(name, draft), self._faults, draft, name)
            for name, pool in settings.all_pools.items()
        }

    def imagined(self, pool: str, document: Document, draft: Draft) -> Scheduling:
        """Build the scheduling of a document in place of the pool's own. Plugins with equal parameters are shared;
        other plugins start without state. Discard the draft afterwards. Raise ConfigError."""
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
    """The graph of one configuration. Mappings are by pool. `limits` is None without limits, `resolver` if no model is
    rewritten."""

    settings: Settings
    authenticator: Authenticator | None
    limits: RateLimiter | None
    flow_controls: Mapping[str, FlowControl]
    warmups: Mapping[str, Warmup]
    schedulings: Mapping[str, Scheduling]
    resolver: Resolver | None
    gateway: Gateway
    served: ServedGraph


@dataclass(slots=True)
class Process:
    """What exists once per process under any configuration. A reload replaces `serving`, the graph in use."""

    state: State
    clock: Clock
    timer: Timer
    random: Random
    fleet: Fleet
    ledger: Ledger
    bindings: Bindings
    trust: PodTlsContexts
    connections: UpstreamPool
    breakers: Breakers
    liveness: Liveness
    observation: Observation
    explaining: Explaining
    decisions: Decisions
    signals: OwnSignals
    model_reads: ModelReads
    polling: Polling | None
    """None if another process polls the pods."""
    workers: int = 1
    """Number of processes that serve together."""
    parser: BodyParser = field(default_factory=BodyParser)
    tasks: Tasks = field(default_factory=Tasks)
    addresses: Addresses = field(init=False)
    """Addresses of pods, as gateways know them."""
    serving: Serving = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = Addresses(self.clock)


def build_serving(settings: Settings, process: Process, draft: Draft) -> Serving:
    """Return the graph of a configuration. Nothing in use changes before the draft is committed. Raise ConfigError."""
    return _Build(settings, process, draft).serving()


def build_authenticator(security: SecuritySettings, clock: Clock, draft: Draft) -> Authenticator | None:
    """Return None if no credentials are required. Raise ConfigError."""
    return authenticator_of(security, clock, os.environ, _fetch_keys, draft)


async def _fetch_keys(url: str) -> tuple[int, bytes]:
    response = await outbound.fetch("GET", url, ISSUER_TIMEOUT, limit=LARGEST_KEYS, allow_redirects=False)
    return response.status, response.body


@dataclass(frozen=True, slots=True)
class _Build:
    """Builds the graph. Modules that few configurations need are imported where a section needs them."""

    settings: Settings
    process: Process
    draft: Draft

    def serving(self) -> Serving:
        settings, process, draft = self.settings, self.process, self.draft
        names = settings.all_pools
        _check_extra(settings.extproc)
        draft.assign(process.fleet, settings=fleet_settings(settings, process.polling is not None))
        draft.assign(process.trust, default=settings.pods.tls, pools=settings.pools_tls)
        draft.assign(process.breakers, settings=settings.reliability.breaker)
        draft.assign(process.liveness, settings=settings.reliability.health)
        draft.assign(process.signals, pools=settings.autoscale.pools)
        explained_log = self._explained_log()
        authenticator = build_authenticator(settings.security, process.clock, draft)
        limits = self._limits(authenticator)
        flow_controls = {name: control for name in names if (control := self._flow_control(name)) is not None}
        gates = {name: self._gates(name, limits, flow_controls.get(name)) for name in names}
        prompts, warmups = self._warmups()
        if process.polling is not None:
            process.polling.build(settings, draft)
        schedulings = process.decisions.build(settings, draft)
        draft.assign(process.decisions, schedulings=schedulings)
        resolver = self._resolver(schedulings, has_gates=any(gates.values()))
        failover = self._failover(schedulings, flow_controls)
        explained = None if explained_log is None else process.explaining.listener(schedulings, explained_log)
        listeners = self._listeners(explained, failover.poison, prompts, schedulings)
        pools = self._pools(schedulings, gates, failover, listeners)
        gateway = self._gateway(authenticator, limits, resolver, failover, pools, explained)
        served = self._served(gateway, authenticator, listeners)
        return Serving(settings, authenticator, limits, flow_controls, warmups, schedulings, resolver, gateway, served)

    # Admission.

    def _limits(self, authenticator: Authenticator | None) -> RateLimiter | None:
        if authenticator is None or not authenticator.has_limits:
            return None
        from proxy.auth.limits import LimitSeries, RateLimiter

        clock, series = self.process.clock, LimitSeries(self.process.observation.catalogue)
        limits = self.draft.get(
            "limits", lambda: RateLimiter(authenticator.limits, authenticator.tenants, clock, series.limited)
        )
        self.draft.assign(limits, limits=authenticator.limits, tenants=authenticator.tenants)
        return limits

    def _flow_control(self, pool: str) -> FlowControl | None:
        """Return None if no request ever waits."""
        process, wanted = self.process, self.settings.all_pools[pool].flow_control
        settings = wanted.part(process.workers)
        if not wanted.limits:
            return None
        pods, series = PoolPods(process.fleet, pool), FlowSeries(process.observation.catalogue, pool)
        control = self.draft.get(("flow-control", pool), lambda: FlowControl(settings, pods, process.clock, series))
        self.draft.assign(control, settings=settings)
        return control

    def _gates(self, pool: str, limits: RateLimiter | None, flow_control: FlowControl | None) -> Sequence[Gate]:
        process, settings = self.process, self.settings.all_pools[pool].flow_control
        subset = SubsetGate(process.addresses) if self.settings.extproc.is_on else None
        ranks = RankGate() if self.settings.security.client_ranks else None
        gates = (limits, subset, ranks, self._shedding(pool, settings), flow_control)
        return [gate for gate in gates if gate is not None]

    def _shedding(self, pool: str, settings: FlowControlSettings) -> SheddingGate | None:
        process = self.process
        series = FlowSeries(process.observation.catalogue, pool)
        return SheddingGate(settings.shedding, process.random, series) if settings.sheds else None

    def _explained_log(self) -> DecisionLog | None:
        """Return None if decisions are not kept."""
        explaining, draft, wanted = self.process.explaining, self.draft, self.settings.telemetry.decisions
        log = None
        if wanted is not None:
            log = draft.get("decision-log", lambda: DecisionLog(wanted, self.process.clock, explaining.prefix))
            draft.assign(log, settings=wanted)
        draft.assign(explaining, log=log)
        return log

    # Models.

    def _resolver(self, schedulings: Mapping[str, Scheduling], has_gates: bool) -> Resolver | None:
        process, draft, settings = self.process, self.draft, self.settings.models
        cluster = self._cluster_names(settings)
        if settings == ModelSettings() and not has_gates:
            return None
        waker = self._waker(settings.wake) if settings.wake.enabled else None
        pools = tuple(self.settings.all_pools)
        resolver = Resolver(
            settings if cluster is None else cluster.added_to(settings),
            process.random,
            ModelSeries(process.observation.catalogue),
            waker,
            pools if len(pools) > 1 else (),
            session_headers(schedulings.values()),
        )
        if cluster is not None:
            draft.assign(cluster, changed=lambda: setattr(resolver, "settings", cluster.added_to(settings)))
        return resolver

    def _cluster_names(self, settings: ModelSettings) -> ClusterNames | None:
        wanted, process = settings.kubernetes, self.process
        if wanted is None:
            return None
        from proxy.models.cluster import ClusterNames

        return self.draft.get("cluster-names", lambda: ClusterNames(wanted, process.clock, process.random), wanted)

    def _waker(self, settings: Wake) -> Waker:
        process, draft, timeout = self.process, self.draft, settings.timeout
        poster = draft.get("wake-connections", lambda: PooledFetcher(timeout, process.clock, process.trust))
        tasks = draft.get("wake-tasks", Tasks)
        waker = draft.get("waker", lambda: Waker(process.fleet, poster, process.clock, tasks, timeout))
        draft.assign(poster, timeout=timeout)
        draft.assign(waker, timeout=timeout)
        return waker

    # Prompts that warm pods up.

    def _warmups(self) -> tuple[Mapping[str, SharedPrompts], Mapping[str, Warmup]]:
        prompts, warmups = {}, {}
        for name, pool in self.settings.all_pools.items():
            if pool.pods.warmup.prompts:
                prompts[name] = self._shared_prompts(name, pool.pods.warmup)
                warmups[name] = self._warmup(name, pool.pods.warmup, prompts[name])
        return prompts, warmups

    def _shared_prompts(self, pool: str, settings: WarmupSettings) -> SharedPrompts:
        from proxy.fleet.warmup import SharedPrompts

        prompts = self.draft.get(("shared-prompts", pool), lambda: SharedPrompts(settings, self.process.clock))
        self.draft.assign(prompts, settings=settings)
        return prompts

    def _warmup(self, pool: str, settings: WarmupSettings, prompts: SharedPrompts) -> Warmup:
        from proxy.fleet.warmup import TIMEOUT, Warmup
        from proxy.warming import WarmingSender

        process, draft = self.process, self.draft
        poster = draft.get(("warmup-connections", pool), lambda: PooledFetcher(TIMEOUT, process.clock, process.trust))
        sender = WarmingSender(lambda: process.serving.gateway, poster, process.clock)
        return draft.get(
            ("warmup", pool), lambda: Warmup(settings, prompts, sender.send, process.clock, process.random), settings
        )

    # The path of requests.

    def _pools(
        self,
        schedulings: Mapping[str, Scheduling],
        gates: Mapping[str, Sequence[Gate]],
        failover: Failover,
        listeners: Listeners,
    ) -> Sequence[Pool]:
        fleet, number = self.process.fleet, len(schedulings)
        return [
            Pool(pods_of(fleet, name, number), one, gates[name], name, self._split_requests(name, failover), listeners)
            for name, one in schedulings.items()
        ]

    def _split_requests(self, pool: str, failover: Failover) -> SplitRequests:
        process = self.process
        return SplitRequests(
            self.settings.all_pools[pool].disaggregation,
            failover,
            process.ledger,
            process.clock,
            process.random,
            process.tasks,
            process.observation.catalogue.handed_over.cell,
            self.settings.security.expose_endpoint,
        )

    def _failover(self, schedulings: Mapping[str, Scheduling], flow_controls: Mapping[str, FlowControl]) -> Failover:
        process, draft, retries = self.process, self.draft, self.settings.reliability.retries
        fleet, clock, percent = process.fleet, process.clock, retries.budget_percent
        budget = draft.get("retry-budget", lambda: RetryBudget(percent, clock, lambda: process.ledger.entered))
        draft.assign(budget, percent=percent)
        first = next(iter(schedulings.values()))

        def others(attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
            """Return ready pods that were no candidates of the decision."""
            request, pool = attempt.request, attempt.endpoint.pool
            pods = [
                pod
                for pod in fleet.ready
                if pod.pool == pool and pod not in tried and (not pod.models or request.model in pod.models)
            ]
            try:
                return schedulings.get(pool, first).scheduler.schedule(request, pods).candidates() if pods else ()
            except RequestError:
                return ()

        return Failover(
            retries,
            clock,
            process.random,
            budget,
            process.connections.takes_connections,
            process.timer.sleep,
            narrow=narrowing(flow_controls),
            others=others,
            count_continuation=process.observation.catalogue.continuations.cell().add,
            poison=draft.get("poison", lambda: Poison(clock, process.connections.takes_connections, process.tasks)),
        )

    def _hedging(self, failover: Failover) -> Hedging | None:
        """Return None if requests are not hedged."""
        process, draft, wanted = self.process, self.draft, self.settings.reliability.hedging
        if wanted is None:
            return None
        from proxy.reliability.hedging import SAVED_UP, HedgeDelays, Hedging

        clock, percent = process.clock, wanted.budget_percent
        delays = draft.get("hedge-delays", lambda: HedgeDelays(wanted))
        draft.assign(delays, settings=wanted)
        budget = draft.get(
            "hedging-budget",
            lambda: RetryBudget(percent, clock, lambda: process.ledger.entered, per_second=0.0, most=SAVED_UP),
        )
        draft.assign(budget, percent=percent)
        return Hedging(wanted, failover, clock, delays, budget, process.observation.catalogue.hedges.cell)

    def _gateway(
        self,
        authenticator: Authenticator | None,
        limits: RateLimiter | None,
        resolver: Resolver | None,
        failover: Failover,
        pools: Sequence[Pool],
        explained: Explained | None,
    ) -> Gateway:
        process, settings = self.process, self.settings
        admission: Admission | Resolver | None = resolver
        if authenticator is not None:
            admission = Admission(resolver, None if limits is None else limits.counts_tokens)
        wants = None if explained is None else explained.wants
        return Gateway(
            process.fleet,
            pools,
            process.bindings,
            process.clock,
            failover,
            hedging=self._hedging(failover),
            request_timeout=settings.reliability.timeouts.request,
            expose_endpoint=settings.security.expose_endpoint,
            ask_for_usage=settings.telemetry.ask_for_usage,
            authorizer=admission,
            model_names=resolver,
            model_reads=process.model_reads,
            recorder=DecisionRecorder(process.observation.observer.plugin_took, wants),
            parser=process.parser,
        )

    def _served(self, gateway: Gateway, authenticator: Authenticator | None, listeners: Listeners) -> ServedGraph:
        process, settings = self.process, self.settings
        return ServedGraph(
            gateway,
            settings.security,
            settings.reliability.timeouts,
            listeners,
            retries_instead=gateway.failover.retries_instead,
            reason_to_give_up=process.liveness.reason_to_give_up,
            authenticator=authenticator,
            continuable_models=settings.reliability.continuation.models,
        )

    def _listeners(
        self,
        explained: Explained | None,
        poison: Poison,
        prompts: Mapping[str, SharedPrompts],
        schedulings: Mapping[str, Scheduling],
    ) -> Listeners:
        """Return the listeners of all pools. The ledger is first: gates and hooks read the cost of an attempt."""
        process = self.process
        reliability: list[Listener] = [process.breakers, poison, ReadsAfterNotFound(process.model_reads)]
        decisions: list[Listener] = [] if explained is None else [explained]
        has_shadows = any(profile.shadow for one in schedulings.values() for profile in one.effective.profiles)
        shadows: list[Listener] = [Shadows(process.observation.observer)] if has_shadows else []
        scaled: list[Listener] = [process.signals] if self.settings.autoscale.pools else []
        warming: list[Listener] = [_Prompts(prompts)] if prompts else []
        observers = [*decisions, *process.observation.listeners, *shadows, *scaled, *warming]
        return Listeners([process.ledger, *reliability, process.bindings, *observers])


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
        raise ConfigError([Problem("extproc.port", "needs the extra: pip install 'kvlane[extproc]'")]) from None


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
