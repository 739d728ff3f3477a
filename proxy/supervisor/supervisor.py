"""`kvlane serve --workers N`: asks the pods, holds the sockets and the admin port, and has workers do the rest."""

from __future__ import annotations

import dataclasses
import logging
import random
import socket
import tempfile
from collections.abc import Iterable, Set
from contextlib import AsyncExitStack
from types import TracebackType

import aiohttp

from proxy import __version__
from proxy.app import FIRST_CONTACT, App
from proxy.core.clock import SystemClock
from proxy.core.endpoint import Endpoint
from proxy.core.tasks import Tasks
from proxy.fleet.ledger import Ledger
from proxy.fleet.mirror import News, Origin
from proxy.fleet.runner import FleetRunner
from proxy.http.admin import admin_application
from proxy.http.admin_server import AdminServer
from proxy.http.settings import Admin
from proxy.http.upstream.fetch import PooledFetcher
from proxy.replicas.hub import Hub
from proxy.replicas.loads import PeerLoads
from proxy.replicas.wire import Kind
from proxy.settings import Settings
from proxy.supervisor.child import Child
from proxy.supervisor.crew import Crew
from proxy.supervisor.host_exposition import HostExposition
from proxy.supervisor.sockets import bound
from proxy.telemetry import loop_lag
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries

log = logging.getLogger(__name__)

_KINDS = {News.POD: Kind.POD, News.METRICS: Kind.METRICS, News.ROLL: Kind.ROLL}


class Supervisor:
    """`async with Supervisor(settings, workers)`: inside of it `workers` processes serve. Raises ConfigError when
    constructed with settings that no worker could run with; entering it raises OSError if an address cannot be had,
    and StartFailed if a worker does not come up.

    With `shares` false workers do not know of each other's requests: for measurements of what that is worth.
    """

    def __init__(self, settings: Settings, workers: int, *, shares: bool = True) -> None:
        self._settings = settings
        self._workers = workers
        self._single = App(settings)
        self._clock = SystemClock()
        self._random = random.Random()
        self._sources: Set[str] = frozenset()
        self._catalogue = Catalogue(__version__)
        self.fleet = Origin(self._clock, self._tell, on_missed=self._missed)
        self._ledger = Ledger(self._clock)
        self._peer_loads = PeerLoads(self._used)
        self._series = EndpointSeries(self._catalogue, self.fleet, (), self._clock)
        dropped, garbled = self._catalogue.bus_dropped.cell(), self._catalogue.bus_garbled.cell()
        self._hub = Hub(self._everything, self._take, self._vanished, dropped, garbled, shares=shares)
        self._exposition = HostExposition(
            self._catalogue, self._series, lambda: list(self._crew.children.values()), lambda: self.serving
        )
        self._stopping = False
        self._asking = AsyncExitStack()
        self._administration = AsyncExitStack()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Supervisor:
        settings = self._settings
        async with AsyncExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-"))
            sockets = bound(settings.listen.host, settings.listen.port, self._workers)
            for sock in (sock for seat in sockets for sock in seat):
                stack.callback(sock.close)
            self.port: int = sockets[0][0].getsockname()[1]
            tasks = await stack.enter_async_context(Tasks())
            tasks.start(loop_lag.probe(self._catalogue.loop_lag.cell(), self._clock), "event loop lag")
            self._session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
            await stack.enter_async_context(self._asking)
            await self._ask_the_pods(settings)
            await stack.enter_async_context(self._administration)
            await self._open_admin(settings)
            await self._runner.first_contact(FIRST_CONTACT)
            restarts = self._catalogue.worker_restarts.cell()
            self._crew = Crew(sockets, directory, self._hub, self._clock, self._left, restarts)
            stack.callback(self._hub.close)
            stack.push_async_callback(self._crew.stop)
            await self._crew.start(settings.given, settings.reliability.drain.grace)
            self._sockets: list[socket.socket] = [sock for seat in sockets for sock in seat]
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

    async def reload(self, settings: Settings) -> None:
        """Serve with other settings, without an interruption. Raises ConfigError, and nothing has changed then."""
        single = App(settings)
        before = self._settings
        if (before.listen.host, before.listen.port) != (settings.listen.host, settings.listen.port):
            log.warning("the address of the data port changes when kvlane is restarted, not when it is reloaded")
        if not await self._crew.replace(settings.given, settings.reliability.drain.grace):
            return
        self._settings, self._single = settings, single
        if (before.pods, before.engines) != (settings.pods, settings.engines):
            await self._asking.aclose()
            await self._ask_the_pods(settings)
            await self._runner.first_contact(FIRST_CONTACT)
        if before.admin != settings.admin:
            await self._move_admin(before, settings)
        log.info("reloaded: %d workers serve with the new configuration", self.serving)

    async def _ask_the_pods(self, settings: Settings) -> None:
        """Pods of a source that the settings do not have any more leave."""
        fetcher = PooledFetcher(settings.pods.refresh.timeout, self._clock)
        runner = FleetRunner(self.fleet, settings.pods, fetcher, self._clock, self._random, settings.engines)
        for source in self._sources - runner.sources:
            self.fleet.reconcile(source, ())
        self._runner, self._sources = runner, runner.sources
        await self._asking.enter_async_context(fetcher)
        await self._asking.enter_async_context(runner)

    async def _open_admin(self, settings: Settings) -> None:
        application = admin_application(
            fleet=self.fleet,
            exposition=self._exposition,
            config=lambda: self._single.effective(),
            session=self._session,
            stopping=lambda: self._stopping or not self.serving,
            api_key=settings.admin.api_key,
        )
        admin = AdminServer(settings.admin, application)
        await self._administration.enter_async_context(admin)
        self._admin = admin

    async def _move_admin(self, before: Settings, settings: Settings) -> None:
        await self._administration.aclose()
        try:
            await self._open_admin(settings)
        except OSError as error:
            log.error("the admin port stays where it was: %s", error)
            await self._open_admin(dataclasses.replace(before, admin=_at(before.admin, settings.admin)))

    # What happens in one room and is known in another.

    def _tell(self, news: News, record: bytes) -> None:
        self._hub.tell(_KINDS[news], record)

    def _everything(self) -> Iterable[tuple[Kind, bytes]]:
        return [(_KINDS[news], record) for news, record in self.fleet.records()]

    def _take(self, worker: int, kind: Kind, body: bytes) -> None:
        child = self._crew.children.get(worker)
        if kind is Kind.LOAD:
            self._peer_loads.take(worker, body)
        elif kind is Kind.RESET:
            self._peer_loads.vanished(worker)
        elif kind is Kind.READY and child is not None:
            child.ready.set()
        elif kind is Kind.LEAVING and child is not None:
            child.leaving.set()
        elif kind is Kind.FAREWELL and child is not None:
            child.exposition = body

    def _vanished(self, worker: int) -> None:
        self._peer_loads.vanished(worker)
        if child := self._crew.children.get(worker):
            child.leaving.set()
            child.unlinked.set()

    def _left(self, child: Child) -> None:
        self._exposition.retire(child)

    def _used(self, name: str, requests: int, tokens: int, work: int) -> None:
        if endpoint := self.fleet.get(name):
            self._ledger.elsewhere(endpoint, requests, tokens, work)

    def _missed(self, endpoint: Endpoint) -> None:
        self._series.of(endpoint).scrape_failures += 1


def _at(before: Admin, wanted: Admin) -> Admin:
    """The old address, with the key that is wanted."""
    return dataclasses.replace(before, api_key=wanted.api_key)
