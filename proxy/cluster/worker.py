"""One of several workers: a proxy that gets its pods and the state of the other workers from the supervisor."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
import orjson
import uvloop

from proxy.cluster.gc_tuning import Collector, resident
from proxy.cluster.membership import peer_id
from proxy.cluster.messages import BROKER, RecordKind
from proxy.cluster.questions import QuestionFailed, Questions
from proxy.cluster.reads import IMAGINED, LISTED, METRICS, SHOWN, SIGNALS
from proxy.cluster.shared import SharedEjections
from proxy.cluster.sharing import SharingApp
from proxy.cluster.workers import READ_MODELS, READ_POD, RELOAD, Setup, read_settings, write_locked
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.fleet.mirror import MessageKind, Mirror
from proxy.fleet.models import ModelReads, ModelRounds
from proxy.http.settings import PodTlsContexts
from proxy.polling import Polling
from proxy.settings import Settings, from_mapping
from proxy.telemetry import logs
from proxy.telemetry.lines import guard_standard_error
from proxy.telemetry.observation import Observation

log = logging.getLogger(__name__)

BEAT_EVERY = 1.0
"""Seconds between two heartbeats, at most: the supervisor replaces a worker without them."""


class Worker(SharingApp):
    """A proxy on inherited sockets. `bus` is connected to the broker. `stop` is set when the supervisor is gone."""

    fleet: Mirror
    _ejections: SharedEjections

    def __init__(self, settings: Settings, setup: Setup, bus: socket.socket, stop: asyncio.Event) -> None:
        self._setup = setup
        self._bus = bus
        self._workers, self._seat = setup.workers, setup.seat
        self._id, self._beat_every = peer_id(bytes.fromhex(setup.host), setup.number), BEAT_EVERY
        self._decision_prefix = f"w{setup.number}-"
        self._stop = stop
        self._knows_the_fleet = asyncio.Event()
        self._is_up = asyncio.Event()
        self._reloading = asyncio.Lock()
        super().__init__(settings)

    async def __aenter__(self) -> Worker:
        await super().__aenter__()
        self._is_up.set()
        self._replica.send_to_supervisor(RecordKind.READY)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._replica.send_to_supervisor(RecordKind.LEAVING)
        await super().__aexit__(*error)

    def _make_fleet(self) -> Mirror:
        fleet = Mirror(
            self._clock,
            on_ready=self._ready,
            on_restarted=self._restarted,
            on_removed=self._removed,
            on_changed=self._capacity_freed,
            on_ejection_change=lambda endpoint: self._ejections.changed(),
            slow_start=self._make_slow_start(),
        )
        fleet.watch(self._replica.added, self._replica.removed)
        self._ejections = SharedEjections(fleet.own_ejections, fleet.peer_ejected, self._replica.publish_local)
        self._replica.state.put(ejections=[self._ejections])
        return fleet

    def _make_polling(self, pod_tls: PodTlsContexts, observation: Observation) -> None:
        """Return no polling: the supervisor polls the pods."""

    def _make_model_reads(self, polling: Polling | None) -> WorkerModelReads:
        return WorkerModelReads(self._replica.questions, self._clock)

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        return self._knows_the_fleet.wait

    async def _listen(self, stack: AsyncExitStack, known: Callable[[], Awaitable[object]]) -> None:
        """Join the host, and listen after the worker knows the pods, because it may replace another worker."""
        await self._replica.connect(self._bus)
        stack.push_async_callback(self._end)
        await known()
        await super()._listen(stack, known)

    async def _open_admin(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        """The admin port is the supervisor's. A worker replies to its questions."""
        explained = self._explained()
        self._replica.questions.handlers.update(
            {
                METRICS: self._observation.exposition.dump,
                SIGNALS: self._signals,
                LISTED: explained.listed,
                SHOWN: explained.shown,
                IMAGINED: explained.imagined,
                RELOAD: self._reload_with,
            }
        )

    async def _start_scaling(self, stack: AsyncExitStack) -> None:
        """Start no scaling: the supervisor scales."""

    def _sockets(self) -> Sequence[socket.socket]:
        return [socket.socket(fileno=number) for number in self._setup.sockets]

    def _sockets_for_envoy(self) -> Sequence[socket.socket]:
        return [socket.socket(fileno=number) for number in self._setup.for_envoy]

    def _log_writer(self) -> Callable[[bytes], int]:
        return partial(write_locked, sys.stdout.fileno())

    async def _end(self) -> None:
        """Send the last metrics to the supervisor. Otherwise the counts since its last request for metrics would be
        lost with this process."""
        self._replica.send_to_supervisor(RecordKind.FAREWELL, orjson.dumps(await self._observation.exposition.dump()))
        await self._replica.close()

    async def _signals(self) -> Any:
        return self._own_signals.current().as_json()

    async def _reload_with(self, packed: str) -> None:
        """Reload these settings. If that fails, the supervisor has all workers return to the previous settings."""
        await self._is_up.wait()
        async with self._reloading:
            await self.reload(await asyncio.to_thread(from_mapping, read_settings(packed)))

    def _receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        if kind in (RecordKind.POD, RecordKind.METRICS, RecordKind.ROLL):
            self.fleet.apply(MessageKind(kind), body)
            if kind is RecordKind.ROLL:
                self._knows_the_fleet.set()
        elif kind is RecordKind.STOPPING:
            self._turn_away()
        elif kind is RecordKind.LEVELS:
            self._levels.apply(body)

    def _lost(self) -> None:
        """The link ends with every worker. Before SIGTERM, it means that the supervisor is gone."""
        self._knows_the_fleet.set()  # so that a start that waits for it ends
        if not self._stop.is_set():
            log.error("lost the supervisor; this worker ends")
            self._stop.set()


class WorkerModelReads(ModelReads):
    """Has the supervisor read the models of pods. What it finds is known here before its reply comes."""

    def __init__(self, questions: Questions, clock: Clock) -> None:
        self._questions = questions
        self._tasks = Tasks()
        self._rounds = ModelRounds(
            lambda: [self._tasks.start(self._ask(READ_MODELS), "models of all pods")], clock, self._tasks
        )

    def next_round(self) -> asyncio.Future[None]:
        return self._rounds.next()

    def read_soon(self, endpoint: Endpoint) -> None:
        self._tasks.start(self._ask(READ_POD, endpoint.name), "models of a pod")

    async def _ask(self, topic: str, *arguments: str) -> None:
        try:
            await self._questions.ask(BROKER, topic, *arguments)
        except QuestionFailed as error:
            log.warning("the supervisor did not read the models of pods: %s", error)


def run(descriptor: int) -> None:
    """Run a worker on the socket to the broker with this descriptor. The supervisor decides when to stop, even when a
    terminal interrupts all of its processes."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    bus = socket.socket(fileno=descriptor)
    setup = Setup.read(sys.stdin.read())
    settings = from_mapping(read_settings(setup.settings))
    guard_standard_error()
    logs.set_up(settings.telemetry, sys.stderr)
    uvloop.run(_serve(settings, setup, bus))


async def _serve(settings: Settings, setup: Setup, bus: socket.socket) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    worker = Worker(settings, setup, bus, stop)
    async with Collector(lambda: not worker.ledger.in_flight, lambda: resident() - worker.index_bytes), worker:
        await stop.wait()
