"""`kvlane serve --workers N`: the supervisor polls the pods and holds the sockets and the admin port; worker processes
serve."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import orjson

from proxy import __version__, outbound
from proxy.app import App
from proxy.auth.authenticator import Authenticator
from proxy.autoscale.autoscaling import Autoscaling
from proxy.cluster.messages import BROKER, RecordKind
from proxy.cluster.reads import HostExposition, WorkersDecisions, WorkerSignals
from proxy.cluster.replica import Replica, new_id
from proxy.cluster.shared import OPENED, SharedBreakers, SharedEjections
from proxy.cluster.sharing import OtherHosts
from proxy.cluster.transport import Broker
from proxy.cluster.workers import READ_MODELS, READ_POD, Workers, bound
from proxy.config.load import ConfigReader
from proxy.config.reload import OF_THE_HOST, Configurations, servable
from proxy.core.endpoint import Endpoint
from proxy.core.ports import SystemClock
from proxy.core.state import Draft, State
from proxy.core.tasks import SystemTimer, Tasks
from proxy.dashboard.dashboard import Dashboard
from proxy.fleet.ledger import Ledger
from proxy.fleet.mirror import MirroredFleet
from proxy.http.admin import AdminServer, admin_application
from proxy.http.settings import PodTlsContexts, server_context
from proxy.polling import Polling, fleet_settings
from proxy.reliability.breaker import Breakers
from proxy.serving import build_authenticator
from proxy.settings import Settings
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.logs import LogLevels
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.process import probe_loop_lag

log = logging.getLogger(__name__)


class Supervisor:
    """A supervisor and its workers: `async with Supervisor(settings, workers)`; inside of it `workers` processes serve.
    The constructor raises ConfigError for settings that no worker could serve with. Entering raises OSError if an
    address is not available, and StartFailed if a worker does not start."""

    def __init__(self, settings: Settings, workers: int, *, reader: ConfigReader | None = None) -> None:
        self._settings = settings
        self._number_of_workers = workers
        self._clock = SystemClock()
        self._random = random.Random()
        self._catalogue = Catalogue(__version__)
        reader = reader or ConfigReader(environ=os.environ)
        self.configurations = Configurations(settings, self, reader, self._clock, self._catalogue)
        self.fleet = self._make_fleet()
        self._breakers = Breakers(settings.reliability.breaker, self._clock, self.fleet, SystemTimer().call_later)
        self._replica = self._make_replica()
        self._broker = Broker(self._replica, self._vanished)
        self._series = EndpointSeries(self._catalogue, self.fleet, self._clock, breaker=self._breakers.state)
        self._levels = LogLevels(
            lambda: self._settings.telemetry.log_level, lambda levels: self._replica.publish(RecordKind.LEVELS, levels)
        )
        self._workers = Workers(self._broker, self._clock, self._catalogue)
        self._signals = WorkerSignals(self._catalogue, self._workers)
        self.autoscaling = Autoscaling(
            settings.autoscale, settings.replicas, self.fleet, self._signals, self._catalogue, self._clock, self._random
        )
        readers = self._signals.read, self.autoscaling.read
        self._exposition = HostExposition(self._catalogue, self._series, self._workers, readers)
        self._dashboard = self._make_dashboard()
        self._pod_tls = PodTlsContexts(settings.pods.tls, lambda: self.fleet.endpoints, settings.pools_tls)
        self._polling = Polling(self.fleet, self._pod_tls, self._clock, self._random, self._series.check_failed)
        self._deployment: OtherHosts | None = None
        if settings.replicas.is_shared:
            self._deployment = OtherHosts(
                settings.replicas,
                self.fleet,
                self._polling,
                self._clock,
                self._random,
                self._catalogue,
                self.configurations,
                self._replica,
                self._broker.received,
            )
            self._broker.deployment = self._deployment
        self._has_started = self._is_stopping = False
        self.picker_port: int | None = None
        """The port for gateways, if it is enabled."""
        self._replica.questions.handlers.update({READ_MODELS: self._polling.next_round, READ_POD: self._read_pod})
        self._authenticator: Authenticator | None = None
        """Of the admin port; each worker has its own for the data port."""
        self._effective: Mapping[str, Any] = {}
        """Every value in effect, with its origin."""
        self._state = State()
        self._stack = AsyncExitStack()
        self._build(settings).commit()

    async def __aenter__(self) -> Supervisor:
        settings = self._settings
        async with AsyncExitStack() as stack:
            for section, tls in (("listen", settings.listen.tls), ("extproc", settings.extproc.tls)):
                if tls is not None:
                    server_context(tls, f"{section}.tls")  # raises OSError for files that no worker could use
            # connections wait in the sockets until the first worker serves
            sockets = bound(stack, settings.listen.host, settings.listen.port, self._number_of_workers)
            self.port: int = sockets[0][0].getsockname()[1]
            for_envoy: list[list[socket.socket]] = [[] for _ in sockets]
            if settings.extproc.port is not None:
                for_envoy = bound(stack, settings.extproc.host, settings.extproc.port, len(sockets))
                self.picker_port = for_envoy[0][0].getsockname()[1]
            self._sockets = [sock for seat in (*sockets, *for_envoy) for sock in seat]
            tasks = await stack.enter_async_context(Tasks())
            tasks.keep(lambda: probe_loop_lag(self._catalogue.loop_lag.cell(), self._clock), "event-loop-lag")
            self._session = await stack.enter_async_context(outbound.session(None, decompress=False))
            await stack.enter_async_context(self._polling.tasks)
            stack.push_async_callback(self._state.close)
            await self._state.finish_commit()
            if self._deployment is not None:
                await stack.enter_async_context(self._deployment)
            await self._open_admin(stack)
            stack.push_async_callback(self._replica.close)
            stack.push_async_callback(self._workers.stop)
            await self._workers.start(sockets, for_envoy, settings)
            self._has_started = True
            await self._polling.first_contact()
            await self.autoscaling.start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop accepting new requests; workers drain, then everything stops, in reverse order of the start."""
        self._is_stopping = True
        for sock in self._sockets:
            sock.close()
        await self._stack.aclose()

    async def wait_for_balancers(self) -> None:
        """Report that the workers are not ready, and serve new requests until load balancers can have noticed."""
        self._is_stopping = True
        self._replica.publish(RecordKind.STOPPING, b"")
        await asyncio.sleep(self._settings.reliability.drain.settle)

    def kill(self) -> None:
        """End all workers at once."""
        self._workers.kill()

    @property
    def admin_port(self) -> int:
        return self._admin.port

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [child.pid for child in self._workers.children.values()]

    @property
    def in_flight(self) -> int:
        """The number of requests in flight at the workers."""
        return self._replica.peer_loads.on_this_host

    @property
    def workers_serving(self) -> int:
        """The number of workers that take new requests."""
        return self._workers.number_serving

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """Serve with other settings: workers reload them or, where that is not possible, are replaced. Return the paths
        of settings that need a restart. Raise ConfigError and change nothing."""
        before, (settings, left) = self._settings, servable(self._settings, wanted, OF_THE_HOST)
        draft = self._build(settings)
        if servable(before, settings)[1]:
            await self._workers.replace(settings)
        else:
            await self._workers.reload(settings)
        draft.commit()
        await self._state.finish_commit()
        self._levels.reload(before.telemetry.log_level)
        log.info("reloaded: %d workers serve with the new configuration", self.workers_serving)
        return left

    def check(self, wanted: Settings) -> Sequence[str]:
        """Return the paths that `reload` would return. Raise ConfigError."""
        settings, left = servable(self._settings, wanted, OF_THE_HOST)
        App(settings)
        return left

    def _build(self, settings: Settings) -> Draft:
        """Return a draft of the supervisor's own settings. Raise ConfigError for settings that no worker could serve
        with."""
        draft = self._state.draft()
        draft.assign(self, _settings=settings, _effective=App(settings).effective())
        draft.assign(self.fleet, settings=fleet_settings(settings, is_polling=True))
        draft.assign(self._pod_tls, default=settings.pods.tls, pools=settings.pools_tls)
        draft.assign(self._breakers, settings=settings.reliability.breaker)
        draft.assign(self, _authenticator=build_authenticator(settings.security, self._clock, draft))
        self._polling.build(settings, draft)
        draft.assign(self._signals, pools=settings.autoscale.pools)
        draft.assign(self.autoscaling, settings=settings.autoscale)
        return draft

    async def _open_admin(self, stack: AsyncExitStack) -> None:
        application = admin_application(
            fleet=self.fleet,
            exposition=self._exposition,
            config=lambda: self._effective,
            session=self._session,
            pod_tls=self._pod_tls,
            stopping=lambda: self._is_stopping or not (self._has_started and self.workers_serving),
            workers=lambda: {"serving": self.workers_serving, "total": self._number_of_workers},
            keys=lambda: (self._settings.admin.api_key, self._authenticator),
            hosts=lambda: self._settings.admin.host_names,
            configurations=self.configurations,
            breaker=self._breakers.state,
            scaled=lambda: self.autoscaling.pools,
            replicas=lambda: self._deployment.status() if self._deployment is not None else {},
            dashboard=self._dashboard,
            explained=WorkersDecisions(self._workers),
            levels=self._levels,
        )
        self._admin = AdminServer(self._settings.admin, application, self._settings.listen.send_timeout)
        await stack.enter_async_context(self._admin)
        await self._dashboard.start(stack, samples_always=False)

    def _make_fleet(self) -> MirroredFleet:
        return MirroredFleet(
            self._clock,
            lambda kind, body: self._replica.publish(RecordKind(kind), body),
            on_missed=lambda endpoint: self._series.scrape_failed(endpoint),
            on_moved=lambda endpoint: self._series.moved(endpoint),
            on_restarted=lambda endpoint: self._breakers.forget(endpoint),
            on_removed=lambda endpoint: self._breakers.forget(endpoint),
            on_ejection_change=lambda endpoint: self._ejections.changed(),
            on_drained=self._drained,
        )

    def _make_replica(self) -> Replica:
        """What the admin port shows of the workers' requests, breakers and ejections."""
        replica = Replica(
            new_id(BROKER),
            self._clock,
            endpoints=tuple,
            apply=Ledger(self._clock).elsewhere,
            receive=self._receive,
            catalogue=self._catalogue,
            snapshot=self._snapshot,
            lease=self._settings.replicas.lease,
        )
        self.fleet.watch(replica.added, replica.removed)
        self._ejections = SharedEjections(self.fleet.own_ejections, self.fleet.peer_ejected, replica.publish_local)
        breakers = SharedBreakers(self._breakers, self.fleet.get, replica.publish)
        replica.state.put(ejections=[self._ejections], breakers=[breakers])
        return replica

    def _make_dashboard(self) -> Dashboard:
        return Dashboard(
            self.fleet,
            self._clock,
            None,
            self._breakers.state,
            self._exposition.counted,
            lambda: self.autoscaling.pools,
            lambda: {
                "config": self.configurations.described(),
                "workers": self.workers_serving,
                "stopping": self._is_stopping,
            },
        )

    # Called by the broker and the fleet.

    def _snapshot(self) -> Iterable[tuple[RecordKind, bytes]]:
        """Yield the records that a worker must have before it serves."""
        for kind, body in self.fleet.messages():
            yield RecordKind(kind), body
        for pod in self.fleet.endpoints:
            if self._breakers.state(pod) == "open":
                yield RecordKind.BREAKER, SharedBreakers.packed(pod, OPENED)
        if self._is_stopping:
            yield RecordKind.STOPPING, b""
        yield RecordKind.LEVELS, self._levels.record
        if self._deployment is not None:
            yield RecordKind.HOSTS, orjson.dumps(self._deployment.shares.place)

    def _receive(self, worker: int, kind: RecordKind, body: bytes) -> None:
        child = self._workers.children.get(worker)
        if child is None:
            return
        if kind is RecordKind.READY:
            child.alive_at = self._clock.now()
            child.ready.set()
        elif kind is RecordKind.LEAVING:
            child.leaving.set()
        elif kind is RecordKind.FAREWELL:
            child.metrics = orjson.loads(body)

    def _vanished(self, worker: int) -> None:
        if child := self._workers.children.get(worker):
            child.vanish()

    async def _read_pod(self, name: str) -> None:
        if endpoint := self.fleet.get(name):
            self._polling.read_soon(endpoint)

    def _drained(self, endpoint: Endpoint) -> None:
        if self._deployment is not None:
            self._deployment.drained(endpoint)
