"""One of several workers: the proxy, told of its pods and its siblings by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

import aiohttp
import uvloop
from aiohttp import web

from proxy.cluster import messages as bodies
from proxy.cluster.messages import Kind
from proxy.cluster.queries import WorkerModelReads
from proxy.cluster.sharing import SharingApp
from proxy.cluster.workers import LockedWriter, Setup
from proxy.collector import Collector, resident
from proxy.core.tasks import Tasks
from proxy.fleet.mirror import Mirror, News
from proxy.http.admin import LARGEST_BODY, in_json
from proxy.http.admin_config import DecisionRoutes
from proxy.http.tls import Trust
from proxy.polling import Polling
from proxy.settings import Settings, from_mapping
from proxy.telemetry import logs
from proxy.telemetry.lines import guard_standard_error
from proxy.telemetry.observation import Observation

log = logging.getLogger(__name__)

ALIVE_EVERY = 1.0
"""Seconds between two messages that tell the supervisor that the event loop turns."""

_NEWS = {Kind.POD: News.POD, Kind.METRICS: News.METRICS, Kind.ROLL: News.ROLL}


class Worker(SharingApp):
    """Serves on sockets it was given; `lost` is called when the supervisor is gone."""

    fleet: Mirror

    def __init__(self, settings: Settings, setup: Setup, lost: Callable[[], None]) -> None:
        self._setup = setup
        self._workers, self._seat = setup.workers, setup.seat
        self._decision_prefix = f"w{setup.worker}-"
        self._on_lost = lost
        self._known = asyncio.Event()
        self._is_up = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._reloads = Tasks()
        super().__init__(settings)

    async def __aenter__(self) -> Worker:
        await super().__aenter__()
        self._is_up.set()
        self._replica.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replica.leaving()
        await super().__aexit__(kind, error, trace)

    def _make_fleet(self) -> Mirror:
        fleet = Mirror(
            self._clock,
            on_ready=self._ready,
            on_restarted=self._restarted,
            on_removed=self._removed,
            on_changed=self._roomier,
            on_ejection_change=lambda endpoint: self._replica.doubting(),
            slow_start=self._make_slow_start(),
        )
        fleet.watch(self._replica.added, self._replica.removed)
        return fleet

    def _make_polling(self, trust: Trust, observation: Observation) -> None:
        """The supervisor polls the pods."""

    def _make_model_reads(self, polling: Polling | None) -> WorkerModelReads:
        self._model_reads = WorkerModelReads(
            lambda number: self._replica.read_round(number), lambda name: self._replica.read_pod(name)
        )
        return self._model_reads

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        return partial(self._join, stack)

    async def _listen(self, stack: AsyncExitStack, known: Callable[[], Awaitable[object]]) -> None:
        """Not before it knows what its siblings know: it may stand in for one of them."""
        await known()
        await super()._listen(stack, self._known.wait)

    async def _join(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._reloads)
        await self._replica.connect(socket.socket(fileno=self._setup.bus))
        stack.push_async_callback(self._say_farewell)
        self._reloads.keep(self._tell_that_it_is_alive, "worker-alive")
        await self._known.wait()

    async def _open_admin(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        """The admin port is the supervisor's; here is only what it adds up, or passes on."""
        application = web.Application(middlewares=[in_json], client_max_size=LARGEST_BODY)
        application.router.add_get("/metrics", self._metrics)
        DecisionRoutes(self._explained()).add_to(application.router)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, self._setup.metrics_path).start()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, _ = await self._observation.exposition.render("")
        return web.Response(body=body)

    async def _begin_scaling(self, stack: AsyncExitStack) -> None:
        """The supervisor does."""

    def _sockets(self) -> Sequence[socket.socket]:
        return [socket.socket(fileno=number) for number in self._setup.listeners]

    def _sockets_for_gateways(self) -> Sequence[socket.socket]:
        return [socket.socket(fileno=number) for number in self._setup.for_gateways]

    def _log_writer(self) -> Callable[[bytes], int]:
        return LockedWriter(self._setup.log_lock_path, sys.stdout.fileno())

    async def _tell_that_it_is_alive(self) -> None:
        while True:
            self._replica.alive()
            await asyncio.sleep(ALIVE_EVERY)

    async def _say_farewell(self) -> None:
        """What was counted since the last scrape would be lost with this process."""
        body, _ = await self._observation.exposition.render("")
        await self._replica.close([(Kind.FAREWELL, body)])

    def _told(self, kind: Kind, record: bytes) -> None:
        if kind in _NEWS:
            self.fleet.apply(_NEWS[kind], record)
        elif kind is Kind.MODELS_READ:
            self._model_reads.over(bodies.numbers(record).get(self._setup.worker, 0))
        elif kind is Kind.STOPPING:
            self._turn_away()
        elif kind is Kind.LEVELS:
            self._levels.take(record)
        elif kind is Kind.SETTINGS:
            self._reloads.start(self._reload_with(record), "reload")
        if kind is Kind.ROLL:
            self._known.set()

    async def _reload_with(self, record: bytes) -> None:
        """What cannot be had is had by nobody: the supervisor sees to that."""
        number, given = pickle.loads(record)
        await self._is_up.wait()
        try:
            async with self._reloading:
                await self.reload(await asyncio.to_thread(from_mapping, given))
        except Exception:
            log.exception("the settings of reload %d cannot be had", number)
            self._replica.reloaded(number, False)
        else:
            self._replica.reloaded(number, True)

    def _lost(self) -> None:
        """Whoever waits for the fleet must not wait for ever."""
        self._known.set()
        self._on_lost()


def main() -> None:
    """The supervisor decides when to stop, also when a terminal interrupts all of its processes."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setup = Setup.read(sys.stdin.buffer)
    settings = from_mapping(setup.given)
    guard_standard_error()
    logs.set_up(settings.telemetry, sys.stderr)
    uvloop.run(_serve(settings, setup))


async def _serve(settings: Settings, setup: Setup) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    lost = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def orphaned() -> None:
        """Called at the end of every worker; before it was told to stop, it means that nobody will tell it."""
        if not stop.is_set():
            lost.set()
            stop.set()

    worker = Worker(settings, setup, orphaned)
    async with Collector(lambda: not worker.ledger.in_flight, lambda: resident() - worker.index_bytes), worker:
        await stop.wait()
    if lost.is_set():
        log.error("the supervisor is gone, and this worker with it")
        shutil.rmtree(setup.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
