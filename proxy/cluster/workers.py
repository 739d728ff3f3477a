"""Worker processes: their sockets, how they start, and the replacement of dead and hanging processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from proxy.autoscale.signals import Signals
from proxy.cluster.questions import QuestionFailed
from proxy.cluster.transport import Broker
from proxy.config.reload import NotApplied
from proxy.core.errors import KvlaneError, RequestError
from proxy.core.params import FromEnvironment
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.http.server import BACKLOG
from proxy.settings import Settings
from proxy.telemetry.metrics import Catalogue, Dump, Merged

log = logging.getLogger(__name__)

RELOAD, READ_MODELS, READ_POD = "reload", "read-models", "read-pod"
"""Topics of questions: the supervisor has a worker serve with other settings; a worker has the supervisor read models
of pods."""

SHORT_LIFE = 10.0
"""Lifetime in seconds below which a worker is replaced after a pause, from its second end on."""

LONGEST_PAUSE = 10.0
START_TIMEOUT = 60.0
HANGS_AFTER = 180.0
"""Seconds after which a successor that does not serve is killed: a host that is overloaded starts it slowly."""

RELOAD_TIMEOUT = 30.0
KILL_AFTER = 5.0
"""Seconds that a worker has in addition to the grace period of the drain."""

CHECK_EVERY = 1.0
"""Seconds between two checks for silent workers."""

SILENT_AFTER = 4.0
"""Seconds after a worker's last heartbeat from which it does not count as serving."""

KILL_SILENT_AFTER = 8.0
"""Seconds after the last heartbeat at which the worker is killed. A successor serves the connections in its accept
queue."""

_ENVIRONMENT = "\0env"
"""Key of a value that came from an environment variable: it is converted to a number where the setting requires one."""


class StartFailed(KvlaneError):
    """A worker ended before it served."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The data that a worker needs to start, on its standard input. It inherits the bound listening sockets."""

    settings: str
    """Packed settings: the checked ones, even if the file has changed since."""
    number: int
    """The number of the worker; it is never reused."""
    host: str = ""
    """In hexadecimal digits."""
    seat: int = 0
    """The seat of the worker, out of `workers`. Its successor has the same seat."""
    workers: int = 1
    sockets: Sequence[int] = ()
    for_envoy: Sequence[int] = ()
    """Listening sockets of the port for gateways."""

    def packed(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(packed: str) -> Setup:
        return Setup(**json.loads(packed))


def packed_settings(settings: Mapping[str, Any]) -> str:
    """Return the values of a configuration as JSON, so that `read_settings` returns the same configuration."""
    return json.dumps(_as_json(settings))


def read_settings(packed: str) -> Mapping[str, Any]:
    def read(found: dict[str, Any]) -> Any:
        return FromEnvironment(found[_ENVIRONMENT]) if found.keys() == {_ENVIRONMENT} else found

    return dict(json.loads(packed, object_hook=read))


def _as_json(value: Any) -> Any:
    if isinstance(value, FromEnvironment):
        return {_ENVIRONMENT: str(value)}
    if isinstance(value, Mapping):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


class Child:
    """A worker from the supervisor's view: a process, and its last published state."""

    def __init__(self, number: int, seat: int, process: asyncio.subprocess.Process, started: float) -> None:
        self.number = number
        self.seat = seat
        self.started = started
        self.ready = asyncio.Event()
        self.leaving = asyncio.Event()
        """Whether it accepts no new connections, or has ended."""
        self.unlinked = asyncio.Event()
        """Set when its link is closed: all its messages have been received."""
        self.has_crashed = False
        """Whether it ended without having announced that."""
        self.metrics: Dump = {}
        self.signals = Signals()
        """Its last metrics, and its last signals for the autoscaler."""
        self.alive_at = started
        """Monotonic seconds of its last packet."""
        self.is_silent = False
        """Whether it serves and has sent no heartbeat for SILENT_AFTER seconds."""
        self._process = process
        self._is_stopping = False

    @property
    def takes_requests(self) -> bool:
        return self.ready.is_set() and not self.leaving.is_set()

    @property
    def replies(self) -> bool:
        return self.ready.is_set() and not self.is_silent and not self.unlinked.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def vanish(self) -> None:
        """Note the end of its link."""
        self.has_crashed = not self.leaving.is_set()
        self.leaving.set()
        self.unlinked.set()

    async def ended(self) -> int:
        """Return the exit code, or the negative number of the signal that ended the process."""
        code = await self._process.wait()
        await self.unlinked.wait()
        return code

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds."""
        if not self._is_stopping:
            self._is_stopping = True
            self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop has not noticed yet
                os.kill(self._process.pid, number)


class Workers:
    """Keeps one worker in every seat: starts them, replaces ended ones, and replaces all of them on request."""

    def __init__(self, broker: Broker, clock: Clock, catalogue: Catalogue) -> None:
        self._broker = broker
        self._clock = clock
        self._catalogue = catalogue
        self._numbers = count(1)
        self._tasks = Tasks()
        self._seated: dict[int, Child] = {}
        self._short_lives: dict[int, int] = {}
        self._starting: set[asyncio.Task[Child]] = set()
        self._is_stopping = False
        self._replacing = asyncio.Lock()
        self.children: dict[int, Child] = {}
        """All that live, by number; draining ones too."""
        self.ended: Dump = {}
        """The counts of all that have ended."""

    @property
    def seated(self) -> list[Child]:
        """The workers that take new requests."""
        return [child for child in self._seated.values() if child.takes_requests and not child.is_silent]

    @property
    def number_serving(self) -> int:
        """The number of workers that take new requests."""
        return len(self.seated)

    async def ask(self, worker: Child, topic: str, *arguments: Any, timeout: float) -> Any:
        """Return the reply of a worker. Raise QuestionFailed, or the RequestError of the worker."""
        try:
            return await self._broker.questions.ask(worker.number, topic, *arguments, timeout=timeout)
        except QuestionFailed as error:
            log.warning("failed to read %s of worker %d: %s", topic, worker.seat, error)
            raise

    async def ask_all(self, topic: str, *arguments: Any, timeout: float) -> list[tuple[Child, Any]]:
        """Return the replies. A worker that does not reply is left out. Raise a RequestError if no worker replies
        with anything else."""
        errors: list[RequestError] = []

        async def reply(worker: Child) -> list[tuple[Child, Any]]:
            try:
                return [(worker, await self.ask(worker, topic, *arguments, timeout=timeout))]
            except QuestionFailed:
                return []
            except RequestError as error:
                errors.append(error)
                return []

        receivers = [worker for worker in self.children.values() if worker.replies]
        found = [each for replies in await asyncio.gather(*map(reply, receivers)) for each in replies]
        if errors and not found:
            raise errors[0]
        return found

    async def start(
        self,
        sockets: Sequence[Sequence[socket.socket]],
        for_envoy: Sequence[Sequence[socket.socket]],
        settings: Settings,
    ) -> None:
        """Start the workers and wait until one serves in every seat. Raise StartFailed. `sockets` and `for_envoy`
        are listening sockets by seat; they stay open here."""
        self._sockets, self._for_envoy, self._settings = sockets, for_envoy, settings
        self._tasks.keep(self._check_for_silence, "silent-workers")
        for child in await asyncio.gather(*(self._spawn(seat, settings) for seat in range(len(self._sockets)))):
            self._seated[child.seat] = child
        for child in list(self._seated.values()):
            if not await self._serves(child):
                raise StartFailed(
                    f"worker {child.seat} ended, or did not serve within {START_TIMEOUT:g} s of its start"
                )

    async def replace(self, settings: Settings) -> None:
        """Replace all workers when their successors serve. Raise NotApplied."""
        async with self._replacing:
            await self._replace(range(len(self._sockets)), settings)
            self._settings = settings

    async def reload(self, settings: Settings) -> None:
        """Have all workers serve with other settings. Raise NotApplied."""
        async with self._replacing:
            faults = await self._serve_with(settings)
            if not faults:
                self._settings = settings
                return
            await self._return(await self._serve_with(self._settings))
        raise NotApplied(f"a worker cannot serve with it: {'; '.join(faults.values())}")

    async def stop(self) -> None:
        """Drain every worker, and kill the ones that still run after the grace period."""
        self._is_stopping = True
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(child.stop(self._grace) for child in list(self.children.values())))
        await self._tasks.stop()

    def kill(self) -> None:
        self._is_stopping = True
        for child in self.children.values():
            child.kill()

    def check(self, late: float = 0.0) -> None:
        """Note which workers are silent, and kill workers that have been silent for too long. During the `late` seconds
        the supervisor read no messages: workers are not blamed for these."""
        now = self._clock.now()
        for child in list(self._seated.values()):
            if not child.ready.is_set():
                child.alive_at += late
                if now - child.alive_at >= HANGS_AFTER and not child.leaving.is_set():
                    text = "worker %d (%d) did not serve within %.0f s of its start; killing and replacing it"
                    log.error(text, child.seat, child.pid, HANGS_AFTER)
                    child.kill()
                continue
            child.alive_at = max(child.alive_at, self._broker.received_at(child.number)) + late
            silent_for = now - child.alive_at
            child.is_silent = child.takes_requests and silent_for >= SILENT_AFTER
            if child.is_silent and silent_for >= KILL_SILENT_AFTER:
                text = "worker %d (%d): its event loop has been blocked for %.0f s; killing and replacing it"
                log.error(text, child.seat, child.pid, silent_for)
                child.kill()

    async def _check_for_silence(self) -> None:
        while True:
            due = self._clock.now() + CHECK_EVERY
            await asyncio.sleep(CHECK_EVERY)
            late = self._clock.now() - due
            self.check(late if late > CHECK_EVERY else 0.0)

    @property
    def _grace(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""
        return self._settings.reliability.drain.grace + KILL_AFTER

    async def _serve_with(self, settings: Settings) -> Mapping[int, str]:
        """Reload the workers. Return by seat why a worker does not serve with the settings; a worker that crashes
        is one of them. The successor of a worker that leaves meanwhile starts with the settings in effect."""
        packed = packed_settings(settings.source)

        async def fault(child: Child) -> str:
            try:
                await self._broker.questions.ask(child.number, RELOAD, packed, timeout=RELOAD_TIMEOUT)
            except (QuestionFailed, RequestError) as error:
                if child.has_crashed or not child.leaving.is_set():
                    return f"worker {child.seat}: {error}"
            return ""

        children = [child for child in self._seated.values() if not child.leaving.is_set()]
        faults = await asyncio.gather(*map(fault, children))
        return {child.seat: why for child, why in zip(children, faults, strict=True) if why}

    async def _return(self, faults: Mapping[int, str]) -> None:
        """Replace the workers, by seat, that do not return to the settings in effect: the others serve with these."""
        if faults:
            log.error("replacing workers that keep refused settings: %s", "; ".join(faults.values()))
            try:
                await self._replace(list(faults), self._settings)
            except NotApplied as error:
                log.error("these workers serve on with the refused settings: %s", error)

    async def _replace(self, seats: Sequence[int], settings: Settings) -> None:
        """Start a successor in each of these seats, one after the other, and stop the old workers when all successors
        serve. If one does not, stop the successors and raise NotApplied: the old workers serve on."""
        successors: list[Child] = []
        with ExitStack() as undo:
            for seat in seats:
                try:
                    successor = await self._spawn(seat, settings)
                except OSError as error:
                    raise NotApplied(f"failed to start worker {seat}: {error}") from None
                undo.callback(self._stop_later, successor)
                successors.append(successor)
                if not await self._serves(successor):
                    raise NotApplied(f"the new worker {seat} does not serve")
            if ended := [successor.seat for successor in successors if not successor.takes_requests]:
                raise NotApplied(f"the new worker {ended[0]} ended")
            undo.pop_all()
        for successor in successors:
            predecessor = self._seated.get(successor.seat)
            self._seated[successor.seat] = successor
            if predecessor is not None:
                self._stop_later(predecessor)

    def _stop_later(self, child: Child) -> None:
        """Stop a worker without waiting for its requests. One that does not serve has none."""
        self._tasks.start(child.stop(self._grace if child.ready.is_set() else 0.0), f"stop of worker {child.seat}")

    async def _spawn(self, seat: int, settings: Settings) -> Child:
        """Start a worker. Raise OSError. A start in progress is not interrupted: otherwise a process would remain that
        is unknown here."""
        start = asyncio.get_running_loop().create_task(self._start_worker(seat, settings))
        self._starting.add(start)
        start.add_done_callback(self._starting.discard)
        return await asyncio.shield(start)

    async def _start_worker(self, seat: int, settings: Settings) -> Child:
        sockets, for_envoy = ([sock.fileno() for sock in of[seat]] for of in (self._sockets, self._for_envoy))
        setup = Setup(
            packed_settings(settings.source),
            next(self._numbers),
            self._broker.host.hex(),
            seat,
            len(self._sockets),
            sockets,
            for_envoy,
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "proxy",
                    "serve",
                    "--worker-fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(), *sockets, *for_envoy),
                )
        except OSError:
            ours.close()
            raise
        assert process.stdin is not None
        process.stdin.write(setup.packed().encode())
        process.stdin.close()
        child = self.children[setup.number] = Child(setup.number, seat, process, self._clock.now())
        self._tasks.start(self._watch(child), f"watch of worker {seat}")
        await self._broker.attach(child.number, ours)
        return child

    async def _serves(self, child: Child) -> bool:
        async with Tasks() as tasks:
            either = (tasks.start(child.ready.wait(), "ready"), tasks.start(child.unlinked.wait(), "ended"))
            await asyncio.wait(either, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        return child.ready.is_set() and not child.unlinked.is_set()

    async def _watch(self, child: Child) -> None:
        """Start a successor as soon as a worker takes no new requests: its accept queue may hold connections."""
        await child.leaving.wait()
        if not self._is_stopping and self._seated.get(child.seat) is child:
            del self._seated[child.seat]
            self._catalogue.worker_restarts.cell().add()
            self._tasks.keep(lambda: self._succeed(child), "successor-of-a-worker", str(child.seat))
        code = await child.ended()
        del self.children[child.number]
        counts = Merged(self._catalogue)
        counts.add_counts(self.ended)
        self.ended = counts.add_counts(child.metrics)
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            log.error("worker %d (%d) %s", child.seat, child.pid, how)

    async def _succeed(self, child: Child) -> None:
        pause = self._pause(child)
        log.error("worker %d (%d) ends on its own; starting the next one in %.1f s", child.seat, child.pid, pause)
        while child.seat not in self._seated:
            await asyncio.sleep(pause)
            async with self._replacing:
                if self._is_stopping or child.seat in self._seated:
                    return
                try:
                    self._seated[child.seat] = await self._spawn(child.seat, self._settings)
                except OSError as error:
                    pause = LONGEST_PAUSE
                    log.error("failed to start a worker; trying again in %.1f s: %s", pause, error)

    def _pause(self, child: Child) -> float:
        if self._clock.now() - child.started > SHORT_LIFE:
            self._short_lives[child.seat] = 0
            return 0.0
        lives = self._short_lives[child.seat] = self._short_lives.get(child.seat, 0) + 1
        return 0.0 if lives == 1 else min(LONGEST_PAUSE, 0.25 * 2.0 ** (lives - 1))


def write_locked(stream: int, batch: bytes) -> int:
    """Write a batch of lines before another process starts its own: a pipe would mix batches that are longer than 4 KB.
    The lock on the stream is the kernel's, so a killed process releases it."""
    fcntl.lockf(stream, fcntl.LOCK_EX)
    try:
        rest = memoryview(batch)
        while rest:
            rest = rest[os.write(stream, rest) :]
    finally:
        fcntl.lockf(stream, fcntl.LOCK_UN)
    return len(batch)


def bound(stack: AsyncExitStack, host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """Return one listening socket per worker for every address of the host, all on one port: the kernel distributes new
    connections among them. They close with the stack. Raise OSError, also if another process listens on the port:
    SO_REUSEPORT alone would share it."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in infos))
    for family, address in addresses:
        socket.create_server(address, family=family).close()
    found: list[list[socket.socket]] = [[] for _ in range(workers)]
    for mine in found:
        for family, address in addresses:
            address = (address[0], port, *address[2:])
            sock = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
            mine.append(stack.enter_context(sock))
            port = port or sock.getsockname()[1]
    return found
