"""One of several workers: the proxy, told of its pods and its siblings by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from types import TracebackType

import aiohttp
import uvloop
from aiohttp import web

from proxy.app import App
from proxy.collector import Collector, resident
from proxy.fleet.bindings import SharedBindings
from proxy.fleet.ledger import SharedLedger
from proxy.fleet.mirror import Mirror, News
from proxy.prefix.index import PrefixIndex
from proxy.replicas.prefixes import SharedIndex, index_tag
from proxy.replicas.replica import Replica
from proxy.replicas.wire import Kind
from proxy.settings import Settings, from_mapping
from proxy.supervisor.log_lock import LockedWriter
from proxy.supervisor.setup import Setup
from proxy.telemetry import logs

log = logging.getLogger(__name__)

MOST_BINDINGS = 20_000
"""That a joining worker is told of: the ones used last."""

_NEWS = {Kind.POD: News.POD, Kind.METRICS: News.METRICS, Kind.ROLL: News.ROLL}


class Worker(App):
    """Serves on sockets it was given; `lost` is called when the supervisor is gone."""

    fleet: Mirror
    ledger: SharedLedger
    _bindings: SharedBindings

    def __init__(self, settings: Settings, setup: Setup, lost: Callable[[], None]) -> None:
        self._setup = setup
        self._on_lost = lost
        self._known = asyncio.Event()
        super().__init__(settings)

    async def __aenter__(self) -> Worker:
        await super().__aenter__()
        self._replica.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replica.leaving()
        await super().__aexit__(kind, error, trace)

    @cached_property
    def _replica(self) -> Replica:
        return Replica(
            endpoints=lambda: self.fleet.endpoints,
            apply=self._used_elsewhere,
            told=self._told,
            bound=self._bound_elsewhere,
            bindings=lambda: self._bindings.recent(MOST_BINDINGS),
            lost=self._lost,
            dropped=self._catalogue.bus_dropped.cell(),
            garbled=self._catalogue.bus_garbled.cell(),
        )

    def _make_fleet(self) -> Mirror:
        fleet = Mirror(self._clock, on_ready=self._ready, on_restarted=self._forget, on_removed=self._removed)
        fleet.watch(self._replica.peer_loads.added, lambda endpoint: None)
        return fleet

    def _make_ledger(self) -> SharedLedger:
        return SharedLedger(self._clock, self._replica.own_loads.changed)

    def _make_bindings(self) -> SharedBindings:
        return SharedBindings(self._clock, self._replica.bound)

    def _indexes(self) -> Sequence[PrefixIndex]:
        for producer in self._prefix_producers():
            producer.index = index = SharedIndex(
                self._clock,
                producer.max_siblings,
                producer.ttl,
                producer.max_bytes,
                tag=index_tag(producer.name, producer.block_size_tokens),
                tell=self._replica.tell,
                find=lambda name: self.fleet.get(name),
            )
            self._replica.indexes.append(index)
        return self._replica.indexes

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        return partial(self._join, stack)

    async def _join(self, stack: AsyncExitStack) -> None:
        await self._replica.connect(socket.socket(fileno=self._setup.bus))
        stack.push_async_callback(self._say_farewell)
        await self._known.wait()

    async def _open_admin(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        """The admin port is the supervisor's; here is only what it adds up."""
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, self._setup.metrics_path).start()

    async def _metrics(self, request: web.Request) -> web.Response:
        body, _ = await self._exposition.render("")
        return web.Response(body=body)

    def _sockets(self) -> Sequence[socket.socket]:
        return [socket.socket(fileno=number) for number in self._setup.listeners]

    def _log_writer(self) -> Callable[[bytes], int]:
        return LockedWriter(self._setup.log_lock_path, sys.stdout.fileno())

    async def _say_farewell(self) -> None:
        """What was counted since the last scrape would be lost with this process."""
        body, _ = await self._exposition.render("")
        await self._replica.close([(Kind.FAREWELL, body)])

    def _told(self, kind: Kind, record: bytes) -> None:
        if kind in _NEWS:
            self.fleet.told(_NEWS[kind], record)
        if kind is Kind.ROLL:
            self._known.set()

    def _used_elsewhere(self, name: str, requests: int, tokens: int, work: int) -> None:
        if endpoint := self.fleet.get(name):
            self.ledger.elsewhere(endpoint, requests, tokens, work)

    def _bound_elsewhere(self, response_id: str, name: str) -> None:
        if endpoint := self.fleet.get(name):
            self._bindings.bound_elsewhere(response_id, endpoint)

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
