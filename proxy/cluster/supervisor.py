"""`kvlane serve --workers N`: asks the pods, holds the sockets and the admin port, and has workers do the rest."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

import orjson

from proxy import __version__, outbound
from proxy.app import App
from proxy.auth.authenticator import Door
from proxy.autoscale.autoscaling import Autoscaling
from proxy.cluster import messages as bodies
from proxy.cluster.messages import Kind, records
from proxy.cluster.queries import HostExposition, RoundsForWorkers, WorkersDecisions, WorkersSenses
from proxy.cluster.shared import PeerLoads, Roster
from proxy.cluster.sharing import Others, shared_doubts
from proxy.cluster.transport import Hub
from proxy.cluster.workers import Child, Crew, bound
from proxy.config.diff import OF_THE_HOST, servable
from proxy.config.load import Reader
from proxy.config.reload import Configurations
from proxy.core.clock import SystemClock
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Problem
from proxy.core.state import Draft, State
from proxy.core.tasks import Tasks
from proxy.dashboard.dashboard import Dashboard, of_workers
from proxy.fleet.ledger import Ledger
from proxy.fleet.mirror import News, Origin
from proxy.http.admin import AdminServer, admin_application
from proxy.http.server import BACKLOG
from proxy.http.tls import Trust, server_context
from proxy.polling import Polling, fleet_settings
from proxy.reliability.breaker import Breakers, call_later
from proxy.serving import build_door
from proxy.settings import Settings
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.logs import LogLevels
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.process import probe_loop_lag

log = logging.getLogger(__name__)

_KINDS = {News.POD: Kind.POD, News.METRICS: Kind.METRICS, News.ROLL: Kind.ROLL}


def _check_tls(settings: Settings) -> None:
    """Raise OSError if the TLS files of a port that workers serve cannot be used: each worker would end with it."""
    for tls in (settings.listen.tls, settings.extproc.tls):
        if tls is not None:
            server_context(tls)


class Supervisor:
    """`async with Supervisor(settings, workers)`: inside of it `workers` processes serve. Raises ConfigError when
    constructed with settings that no worker could run with; entering it raises OSError if an address cannot be had,
    and StartFailed if a worker does not come up.

    With `shares` false workers do not know of each other's requests: for measurements of what that is worth.
    """

    def __init__(self, settings: Settings, workers: int, *, shares: bool = True, reader: Reader | None = None) -> None:
        self._settings = settings
        self._workers = workers
        self._single = App(settings)
        self._clock = SystemClock()
        self._random = random.Random()
        self._catalogue = Catalogue(__version__)
        reader = reader or Reader(environ=os.environ)
        self.configurations = Configurations(settings, self, reader, self._clock, self._catalogue)
        self.fleet = Origin(
            self._clock,
            self._tell,
            on_missed=self._missed,
            on_moved=self._moved,
            on_restarted=self._restarted,
            on_removed=self._restarted,
            on_ejection_change=self._doubting,
            on_drained=self._drained,
        )
        self._breakers = Breakers(settings.reliability.breaker, self._clock, self.fleet, call_later)
        self._ledger = Ledger(self._clock)
        roster = Roster()
        self.fleet.watch(roster.added, roster.removed)
        self._peer_loads = PeerLoads(roster.get, self._ledger.elsewhere)
        self._series = EndpointSeries(
            self._catalogue,
            self.fleet,
            (),
            self._clock,
            doubts=self.fleet.ejection_reasons,
            breaker=self._breakers.state,
        )
        dropped, garbled = self._catalogue.bus_dropped.cell(), self._catalogue.bus_garbled.cell()
        self._hub = Hub(self._everything, self._take, self._vanished, dropped, garbled, shares=shares)
        self._readers: list[Callable[[], None]] = []
        self._levels = LogLevels(
            lambda: self._settings.telemetry.log_level, lambda levels: self._hub.tell(Kind.LEVELS, levels)
        )
        self._exposition = HostExposition(
            self._catalogue,
            self._series,
            lambda: list(self._crew.children.values()),
            lambda: self.serving,
            self._readers,
        )
        self._senses = WorkersSenses(self._catalogue, self._exposition.of_workers)
        self.autoscaling = Autoscaling(
            settings.autoscale, settings.replicas, self.fleet, self._senses, self._catalogue, self._clock, self._random
        )
        self._readers.extend((self._senses.read, self.autoscaling.read))
        self._dashboard = self._make_dashboard()
        self._others: Others | None = None
        """Of other hosts; the supervisor speaks for this one."""
        if settings.replicas.is_shared and shares:
            self._others = Others(
                settings.replicas,
                self.fleet,
                self._clock,
                self._random,
                self._catalogue,
                self.configurations,
                self._hub,
            )
            self._hub.uplink = self._others.deployment
        self._has_started = self._stopping = False
        self.picker_port: int | None = None
        """Where gateways ask; None if they may not."""
        self._trust = Trust(settings.pods.tls, lambda: self.fleet.endpoints, settings.pools_tls)
        self._polling = Polling(self.fleet, self._trust, self._clock, self._random, self._series.check_failed)
        self._model_rounds = RoundsForWorkers(
            self._polling,
            lambda numbers: self._hub.tell(Kind.MODELS_READ, orjson.dumps(list(numbers.items()))),
        )
        self._door: Door | None = None
        """Of the admin port; each worker has its own for the data port."""
        self._state = State()
        self._stack = AsyncExitStack()
        self._build(settings).commit()

    async def __aenter__(self) -> Supervisor:
        settings = self._settings
        async with AsyncExitStack() as stack:
            _check_tls(settings)
            self._directory = directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-"))
            sockets = self._bound(stack, settings.listen.host, settings.listen.port)
            self.port: int = sockets[0][0].getsockname()[1]
            for_gateways: list[list[socket.socket]] = [[] for _ in sockets]
            if settings.extproc.port is not None:
                for_gateways = self._bound(stack, settings.extproc.host, settings.extproc.port)
                self.picker_port = for_gateways[0][0].getsockname()[1]
            self._sockets = [sock for seat in (*sockets, *for_gateways) for sock in seat]
            tasks = await stack.enter_async_context(Tasks())
            tasks.keep(lambda: probe_loop_lag(self._catalogue.loop_lag.cell(), self._clock), "event-loop-lag")
            self._session = await stack.enter_async_context(outbound.session(None, decompress=False))
            await stack.enter_async_context(self._polling.tasks)
            stack.push_async_callback(self._state.close)
            await self._state.settle()
            if self._others is not None:
                await stack.enter_async_context(self._others.deployment)
            await self._open_admin(stack)
            for sock in self._sockets:
                sock.listen(BACKLOG)  # they wait until the first worker is there
            restarts = self._catalogue.worker_restarts.cell()
            self._crew = Crew(sockets, directory, self._hub, self._clock, self._left, restarts, for_gateways)
            stack.callback(self._hub.close)
            stack.push_async_callback(self._crew.stop)
            await self._crew.start(settings.source, settings.reliability.drain.grace)
            self._has_started = True
            await self._polling.first_contact()
            await self.autoscaling.begin(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody new is let in; workers drain, then everything stops, last started first."""
        self._stopping = True
        for sock in self._sockets:
            sock.close()
        await self._stack.aclose()

    def _bound(self, stack: AsyncExitStack, host: str, port: int) -> list[list[socket.socket]]:
        sockets = bound(host, port, self._workers)
        for sock in (sock for seat in sockets for sock in seat):
            stack.callback(sock.close)
        return sockets

    async def settle(self) -> None:
        """Says that new requests are not wanted, and serves those that come all the same until balancers have heard."""
        self._stopping = True
        self._hub.tell(Kind.STOPPING, b"")
        await asyncio.sleep(self._settings.reliability.drain.settle)

    def kill(self) -> None:
        """What runs is cut, at once; nothing is left behind."""
        self._crew.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def admin_port(self) -> int:
        return self._admin.port

    @property
    def pids(self) -> list[int]:
        """Of the workers that live."""
        return [child.pid for child in self._crew.children.values()]

    @property
    def serving(self) -> int:
        """Workers that take new requests."""
        return self._crew.serving

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """Serves with other settings: workers change them as they are or, where that cannot be, are replaced one after
        the other. Gives the paths of what can only be had by a restart, and stays as it was. Raises ConfigError, and
        nothing has changed then."""
        before, (settings, left) = self._settings, servable(self._settings, wanted, OF_THE_HOST)
        draft = self._build(settings)
        await self._change_workers(before, settings)
        draft.commit()
        await self._state.settle()
        log.info("reloaded: %d workers serve with the new configuration", self.serving)
        return left

    def _build(self, settings: Settings) -> Draft:
        """Raises ConfigError for what no worker could serve with either."""
        draft, single = self._state.draft(), App(settings)
        draft.assign(self, _settings=settings, _single=single)
        draft.assign(self.fleet, settings=fleet_settings(settings, is_polling=True))
        draft.assign(self._trust, default=settings.pods.tls, pools=settings.pools_tls)
        draft.assign(self._breakers, settings=settings.reliability.breaker)
        draft.assign(self, _door=build_door(settings.security, self._clock, draft))
        self._polling.build(settings, draft)
        draft.assign(self._senses, pools=settings.autoscale.pools)
        draft.assign(self.autoscaling, settings=settings.autoscale)
        return draft

    def check(self, wanted: Settings) -> Sequence[str]:
        """What `reload` would give. Raises ConfigError."""
        settings, left = servable(self._settings, wanted, OF_THE_HOST)
        App(settings)
        return left

    async def _change_workers(self, before: Settings, settings: Settings) -> None:
        """All of them, or none."""
        grace = settings.reliability.drain.grace
        if not servable(before, settings)[1]:
            serve = await self._crew.reload(settings.source, grace)
        else:
            serve = await self._crew.replace(settings.source, grace)
            if not serve:
                await self._crew.replace(before.source, before.reliability.drain.grace)
        if not serve:
            raise ConfigError([Problem("", "a worker cannot serve with it; the log says why")])

    async def _open_admin(self, stack: AsyncExitStack) -> None:
        application = admin_application(
            fleet=self.fleet,
            exposition=self._exposition,
            config=lambda: self._single.effective(),
            session=self._session,
            trust=self._trust,
            stopping=lambda: self._stopping or not (self._has_started and self.serving),
            workers=lambda: {"serving": self.serving, "total": self._workers},
            keys=lambda: (self._settings.admin.api_key, self._door),
            hosts=lambda: self._settings.admin.host_names,
            configurations=self.configurations,
            breaker=self._breakers.state,
            scaled=lambda: self.autoscaling.pools,
            replicas=lambda: self._others.deployment.status() if self._others is not None else {},
            dashboard=self._dashboard.routes,
            explained=WorkersDecisions(lambda: list(self._crew.children.values())),
            levels=self._levels,
        )
        self._admin = AdminServer(self._settings.admin, application, self._settings.listen.send_timeout)
        await stack.enter_async_context(self._admin)
        await self._dashboard.begin(stack, samples_always=False)

    def _make_dashboard(self) -> Dashboard:
        return Dashboard(
            self.fleet,
            self._clock,
            None,
            self._breakers.state,
            of_workers(self._exposition.counted),
            lambda: self.autoscaling.pools,
            lambda: {
                "config": self.configurations.described(),
                "workers": self.serving,
                "stopping": self._stopping,
            },
        )

    # What happens in one room and is known in another.

    def _tell(self, news: News, record: bytes) -> None:
        self._hub.tell(_KINDS[news], record)

    def _everything(self) -> Iterable[tuple[Kind, bytes]]:
        known = [(_KINDS[news], record) for news, record in self.fleet.messages()]
        open_breakers = [pod.name for pod in self.fleet.endpoints if self._breakers.state(pod) == "open"]
        broken = [(Kind.BREAKER, orjson.dumps((name, True))) for name in open_breakers]
        stopping = [(Kind.STOPPING, b"")] if self._stopping else []
        levels = [(Kind.LEVELS, self._levels.record)] if self._levels.is_changed else []
        hosts = [] if self._others is None else records(self._others.deployment.shares.record)
        return [*known, (Kind.DOUBTS, self._doubts()), *broken, *stopping, *levels, *hosts]

    def _doubts(self) -> bytes:
        return orjson.dumps(shared_doubts(self.fleet))

    def _take(self, worker: int, kind: Kind, body: bytes) -> None:
        child = self._crew.children.get(worker)
        if kind is Kind.LOAD:
            self._peer_loads.take(worker, body)
        elif kind is Kind.RESET:
            self._peer_loads.vanished(worker)
        elif kind is Kind.DOUBTS:
            self.fleet.peer_ejected(worker, bodies.doubts(body))
        elif kind is Kind.BREAKER:
            self._broke(*bodies.breaker(body))
        elif kind is Kind.TRIED and (endpoint := self.fleet.get(bodies.pod(body))):
            self._breakers.hold_off(endpoint)
        elif kind is Kind.DRAINS and self._others is not None:
            self._others.drains.take(body)
        elif kind is Kind.RELOADED:
            self._crew.reloaded(worker, *bodies.reloaded(body))
        elif kind is Kind.READ_ROUND:
            self._model_rounds.ask(worker, bodies.number(body))
        elif kind is Kind.READ_POD and (endpoint := self.fleet.get(bodies.pod(body))):
            self._polling.read_soon(endpoint)
        elif kind is Kind.ALIVE and child is not None:
            child.alive_at = self._clock.now()
        elif kind is Kind.READY and child is not None:
            child.alive_at = self._clock.now()
            child.ready.set()
        elif kind is Kind.LEAVING and child is not None:
            child.leaving.set()
        elif kind is Kind.FAREWELL and child is not None:
            child.exposition = body

    def _vanished(self, worker: int) -> None:
        self._peer_loads.vanished(worker)
        self.fleet.peer_ejected(worker, {})
        if child := self._crew.children.get(worker):
            child.leaving.set()
            child.unlinked.set()

    def _left(self, child: Child) -> None:
        self._exposition.retire(child)

    def _broke(self, name: str, is_open: bool) -> None:
        if endpoint := self.fleet.get(name):
            self._breakers.hear(endpoint, is_open)

    def _doubting(self, endpoint: Endpoint) -> None:
        self._hub.tell(Kind.DOUBTS, self._doubts())

    def _drained(self, endpoint: Endpoint) -> None:
        if self._others is not None:
            self._others.drains.turned(endpoint, self.fleet.drains(endpoint))

    def _moved(self, endpoint: Endpoint) -> None:
        self._series.moved(endpoint)

    def _restarted(self, endpoint: Endpoint) -> None:
        self._breakers.forget(endpoint)

    def _missed(self, endpoint: Endpoint) -> None:
        self._series.of(endpoint).scrape_failures += 1
