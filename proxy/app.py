"""The composition root: everything is constructed here, in the order in which it starts."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp

from proxy import __version__
from proxy.core.clock import SystemClock
from proxy.core.decision import Decision, ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange
from proxy.core.ports import Clock, Random
from proxy.core.registry import Registry
from proxy.core.tasks import Tasks
from proxy.fleet.bindings import Bindings
from proxy.fleet.datastore import Fleet
from proxy.fleet.ledger import Ledger
from proxy.fleet.runner import FleetRunner
from proxy.gateway import Gateway
from proxy.http.admin import admin_application
from proxy.http.admin_server import AdminServer
from proxy.http.server import DataServer
from proxy.http.upstream.fetch import PooledFetcher
from proxy.parsing.reader import BodyParser
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.prefix.index import PrefixIndex
from proxy.scheduling.build import Scheduling, Watch, build
from proxy.settings import Settings, effective
from proxy.telemetry import loop_lag
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.exposition import Exposition
from proxy.telemetry.observer import Observer
from proxy.telemetry.timing import EVERY, Timing

FIRST_CONTACT = 5.0
"""Seconds that the listening ports wait for the pods to be tried once, so that the first requests find them."""


class App:
    """`async with App(settings) as app`: inside of it the proxy serves. Raises ConfigError when constructed with
    settings whose scheduling cannot be built."""

    def __init__(self, settings: Settings, registry: Registry | None = None) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._random = random.Random()
        self._stack = AsyncExitStack()
        self._catalogue = Catalogue(__version__)
        self.scheduling = self._build(registry or Registry.discover())
        self.fleet = self._make_fleet()
        self.ledger = self._make_ledger()
        self._bindings = self._make_bindings()
        self._endpoint_series = EndpointSeries(
            self._catalogue, self.fleet, self._indexes(), self._clock, predictors=self._predictors()
        )

    async def __aenter__(self) -> App:
        settings, clock = self._settings, self._clock
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(Tasks())
            await self._observe(stack, tasks)
            known = await self._know_the_fleet(stack)
            self._gateway = Gateway(
                self.fleet,
                self.scheduling,
                self.ledger,
                self._bindings,
                self.observer,
                clock,
                attempts=settings.reliability.retries.attempts,
                expose_endpoint=settings.security.expose_endpoint,
                parser=await stack.enter_async_context(BodyParser()),
            )
            self._data = DataServer(
                settings.listen,
                settings.security,
                settings.reliability.timeouts,
                self._gateway,
                clock,
                on_first_byte=self._first_byte,
                on_end=self.observer.request_ended,
            )
            session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
            tasks.start(loop_lag.probe(self._catalogue.loop_lag.cell(), clock), "event loop lag")
            await self._open_admin(stack, session)
            await known()
            await self._data.start(self._sockets())
            stack.push_async_callback(self._data.stop, settings.reliability.drain.grace)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Streams that run are given the drain's grace; then everything stops, last started first."""
        self._gateway.stopping = True
        await self._stack.aclose()

    @property
    def port(self) -> int:
        return self._data.port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    @property
    def index_bytes(self) -> int:
        """Upper bound of the memory of the prefix indexes."""
        return sum(producer.index.bytes for producer in self._prefix_producers())

    def effective(self) -> dict[str, Any]:
        """The configuration in effect, every value with its origin."""
        return {**effective(self._settings), "scheduling": self.scheduling.effective.as_dict()}

    def _build(self, registry: Registry) -> Scheduling:
        ports = {Clock: self._clock, Random: self._random}
        watch = Watch(Timing(self._catalogue, time.perf_counter).wrap, EVERY)
        return build(self._settings.scheduling, registry, ports, watch, self._scorer_fault, self._shadow)

    async def _observe(self, stack: AsyncExitStack, tasks: Tasks) -> None:
        catalogue, series, access_log = self._catalogue, self._endpoint_series, None
        if self._settings.telemetry.access_log:
            access_log = AccessLog(self._log_writer(), self._clock, catalogue.log_lines_lost.cell())
            await stack.enter_async_context(access_log)
        self.observer = Observer(catalogue, series, self._clock, access_log)
        stack.callback(self.observer.flush)
        tasks.start(self.observer.run(), "metrics and access log")
        self._exposition = Exposition(catalogue, series, self.observer)

    # What a process has of its own, and a worker among several has from its supervisor.

    def _make_fleet(self) -> Fleet:
        return Fleet(
            self._clock,
            on_ready=self._ready,
            on_restarted=self._forget,
            on_removed=self._removed,
            on_missed=self._missed,
        )

    def _make_ledger(self) -> Ledger:
        return Ledger(self._clock)

    def _make_bindings(self) -> Bindings:
        return Bindings(self._clock)

    def _indexes(self) -> Sequence[PrefixIndex]:
        return [producer.index for producer in self._prefix_producers()]

    def _prefix_producers(self) -> list[ApproxPrefixCacheProducer]:
        plugins = self.scheduling.instances.values()
        return [plugin for plugin in plugins if isinstance(plugin, ApproxPrefixCacheProducer)]

    def _predictors(self) -> list[PredictedLatencyProducer]:
        plugins = self.scheduling.instances.values()
        return [plugin for plugin in plugins if isinstance(plugin, PredictedLatencyProducer)]

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """Begins to; what it returns waits until as much is known as requests need."""
        settings = self._settings
        fetcher = await stack.enter_async_context(PooledFetcher(settings.pods.refresh.timeout, self._clock))
        runner = FleetRunner(self.fleet, settings.pods, fetcher, self._clock, self._random, settings.engines)
        await stack.enter_async_context(runner)
        return partial(runner.first_contact, FIRST_CONTACT)

    async def _open_admin(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        self._admin = AdminServer(self._settings.admin, self._admin_application(session))
        await stack.enter_async_context(self._admin)

    def _sockets(self) -> Sequence[socket.socket]:
        return ()

    def _log_writer(self) -> Callable[[bytes], int]:
        return partial(os.write, sys.stdout.fileno())

    def _admin_application(self, session: aiohttp.ClientSession) -> Any:
        return admin_application(
            fleet=self.fleet,
            exposition=self._exposition,
            config=self.effective,
            session=session,
            stopping=lambda: self._gateway.stopping,
            api_key=self._settings.admin.api_key,
        )

    # What happens in one room and is known in another.

    def _first_byte(self, exchange: Exchange) -> None:
        self.ledger.first_byte(exchange)
        self.observer.first_byte(exchange)

    def _ready(self, endpoint: Endpoint) -> None:
        self.ledger.level(endpoint, self.fleet.ready)

    def _removed(self, endpoint: Endpoint) -> None:
        self._forget(endpoint)
        self._data.pool.forget(endpoint)

    def _missed(self, endpoint: Endpoint) -> None:
        self.observer.scrape_failed(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        """What was in the pod's memory: cached prefixes, stored responses."""
        self._bindings.forget(endpoint)
        for plugin in self.scheduling.endpoint_removed:
            plugin.endpoint_removed(endpoint)

    def _scorer_fault(self, plugin: str, fault: str) -> None:
        self.observer.scorer_fault(plugin, fault)

    def _shadow(self, decision: Decision, result: ProfileResult) -> None:
        self.observer.shadow(decision, result)
