"""Worker processes: their sockets, how they start, and how those that die or hang are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, BinaryIO

from proxy.cluster.messages import Kind
from proxy.cluster.transport import Hub
from proxy.core.ports import Clock, Tally
from proxy.core.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Setup:
    """`given` is the configuration as it was checked, whatever became of the file since. `worker` is a number that no
    other worker ever had. File descriptors are inherited: of the bus, and of listening sockets, which are bound."""

    given: Mapping[str, Any]
    worker: int
    bus: int
    listeners: tuple[int, ...]
    directory: str
    workers: int = 1
    """How many there are."""
    seat: int = 0
    """Which of them this one is; its successor has the same."""
    for_gateways: tuple[int, ...] = ()
    """Listening sockets too, if gateways may ask."""

    @property
    def metrics_path(self) -> str:
        """Of the unix socket with the worker's own exposition."""
        return f"{self.directory}/worker-{self.worker}.sock"

    @property
    def log_lock_path(self) -> str:
        return f"{self.directory}/access-log.lock"

    def packed(self) -> bytes:
        """Pickled: between a process and its child there is nobody."""
        return pickle.dumps(self)

    @staticmethod
    def read(stream: BinaryIO) -> Setup:
        setup: Setup = pickle.load(stream)
        return setup


def bound(host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """For each worker one socket for every address of the host, all on one port; the kernel shares new connections out
    among them. Raises OSError, also if somebody else listens there: SO_REUSEPORT alone would share with them."""
    with ExitStack() as stack:
        addresses = _addresses(host, port)
        for family, address in addresses:
            _bind(family, address).close()
        found: list[list[socket.socket]] = []
        for _ in range(workers):
            mine = []
            for family, address in addresses:
                sock = stack.enter_context(_bind(family, (address[0], port, *address[2:]), shared=True))
                port = port or sock.getsockname()[1]
                mine.append(sock)
            found.append(mine)
        stack.pop_all()
    return found


def _addresses(host: str, port: int) -> Sequence[tuple[int, tuple[str, int]]]:
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))  # type: ignore[misc]


def _bind(family: int, address: tuple[object, ...], shared: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"error while attempting to bind on address {address}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return sock


class LockedWriter:
    """Writes all of a batch of lines before another process begins with its own: a pipe would mix batches that are
    longer than 4 KB. The lock is that of a file, so a process that is killed gives it back."""

    def __init__(self, path: str, stream: int) -> None:
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._stream = stream

    def __call__(self, batch: bytes) -> int:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            rest = memoryview(batch)
            while rest:
                rest = rest[os.write(self._stream, rest) :]
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        return len(batch)


MODULE = "proxy.cluster.worker"


class Child:
    """`seat` says whose sockets it has, `number` tells it from all other workers that ever were."""

    def __init__(
        self, number: int, seat: int, process: asyncio.subprocess.Process, setup: Setup, started: float
    ) -> None:
        self.number = number
        self.seat = seat
        self.metrics_path = setup.metrics_path
        self.started = started
        self.ready = asyncio.Event()
        self.leaving = asyncio.Event()
        """It takes nobody new, whoever told it to stop; nor does one that is gone."""
        self.unlinked = asyncio.Event()
        """Its end of the bus is closed: all that it said has been heard."""
        self.exposition = b""
        """Of its last answer to a scrape, or its farewell."""
        self.alive_at = started
        """When the process last said that its event loop turns, in monotonic seconds."""
        self.is_silent = False
        """Whether it serves and has not said so for a while: see `Crew`."""
        self._process = process
        self._asked = False

    @classmethod
    async def start(
        cls, seat: int, setup: Setup, sockets: Sequence[socket.socket], bus: socket.socket, started: float
    ) -> Child:
        """The process has its setup; it says that it is ready over the bus, of which `bus` is its end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(bus.fileno(), *(sock.fileno() for sock in sockets)),
        )
        assert process.stdin is not None
        process.stdin.write(setup.packed())
        process.stdin.close()
        return cls(setup.worker, seat, process, setup, started)

    @property
    def takes_requests(self) -> bool:
        """Whether it has said that it serves, and not that it leaves."""
        return self.ready.is_set() and not self.leaving.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """The exit code; the negative number of a signal that ended it."""
        code = await self._process.wait()
        await self.unlinked.wait()
        return code

    async def stop(self, grace: float) -> None:
        """Asked to end, once, and killed if it has not within `grace` seconds."""
        if not self._asked:
            self._asked = True
            self._signal(15)
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        self._signal(9)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to hear of it
                os.kill(self._process.pid, number)


log = logging.getLogger(__name__)

SHORT_LIFE = 10.0
"""Seconds. A worker that lives no longer than that is replaced after a pause; a first one at once."""

LONGEST_PAUSE = 10.0
START_TIMEOUT = 60.0
RELOAD_TIMEOUT = 30.0
KILL_AFTER = 5.0
"""Seconds on top of the drain's grace."""


LOOK_EVERY = 1.0
"""Seconds between two looks at which workers are silent."""

SILENT_AFTER = 4.0
"""Seconds after the last message of a worker that its event loop turns; from then on it does not count as serving."""

KILL_SILENT_AFTER = 8.0
"""Seconds after that message; then the worker is killed, and a successor serves what waits in its accept queue."""


class StartFailed(Exception):
    """A worker ended before it served."""


class Crew:
    """`sockets` are those of each seat, and `for_gateways` too; they stay open here, whoever accepts from them. `left`
    is called with every worker that is gone."""

    def __init__(
        self,
        sockets: Sequence[Sequence[socket.socket]],
        directory: str,
        hub: Hub,
        clock: Clock,
        left: Callable[[Child], None],
        restarts: Tally,
        for_gateways: Sequence[Sequence[socket.socket]],
    ) -> None:
        self._sockets = sockets
        self._directory = directory
        self._hub = hub
        self._clock = clock
        self._left = left
        self._restarts = restarts
        self._for_gateways = for_gateways
        self._numbers = count(1)
        self._tasks = Tasks()
        self._seated: dict[int, Child] = {}
        self._short_lives: dict[int, int] = {}
        self._starting: set[asyncio.Task[Child]] = set()
        self._stopping = False
        self._replacing = asyncio.Lock()
        self._reloads = count(1)
        self._answers: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Of the last reload, by worker and number."""
        self.children: dict[int, Child] = {}
        """All that live, by number; those that drain too."""

    @property
    def serving(self) -> int:
        """Workers that take new requests."""
        return sum(child.takes_requests and not child.is_silent for child in self._seated.values())

    async def start(self, given: Mapping[str, Any], grace: float) -> None:
        """A worker for every seat, and all of them serve. Raises StartFailed."""
        self._given, self._grace = given, grace
        self._tasks.keep(self._look_for_silent_workers, "silent-workers")
        for child in await asyncio.gather(*(self._spawn(seat, given) for seat in range(len(self._sockets)))):
            self._seat(child)
        for child in list(self._seated.values()):
            if not await self._serves(child):
                raise StartFailed(
                    f"worker {child.seat} ended, or did not serve within {START_TIMEOUT:g} s of its start"
                )

    async def replace(self, given: Mapping[str, Any], grace: float) -> bool:
        """One after the other, each as soon as its successor serves. False if one could not be replaced: it and those
        after it stay, and what dies is replaced as before."""
        async with self._replacing:
            for seat in range(len(self._sockets)):
                successor = await self._spawn(seat, given)
                if not await self._serves(successor):
                    log.error("the new worker %d does not serve: the old one stays", seat)
                    await successor.stop(0.0)
                    return False
                predecessor = self._seated.get(seat)
                self._seat(successor)
                if predecessor is not None and predecessor.number in self.children:
                    self._tasks.start(predecessor.stop(self._grace + KILL_AFTER), f"stop of worker {seat}")
            self._given, self._grace = given, grace
        return True

    async def reload(self, given: Mapping[str, Any], grace: float) -> bool:
        """All of them as they are. False if one cannot: then all serve as before."""
        async with self._replacing:
            before = self._given
            self._given = given
            if await self._all_serve_with(given):
                self._grace = grace
                return True
            self._given = before
            await self._all_serve_with(before)
            return False

    def reloaded(self, worker: int, number: int, is_good: bool) -> None:
        """What a worker says of the settings of this number."""
        answer = self._answers.get((worker, number))
        if answer is not None and not answer.done():
            answer.set_result(is_good)

    async def stop(self) -> None:
        """Every worker drains; what then still runs is killed."""
        self._stopping = True
        await asyncio.gather(*self._starting, return_exceptions=True)
        grace = self._grace + KILL_AFTER
        await asyncio.gather(*(child.stop(grace) for child in list(self.children.values())))
        await self._tasks.stop()

    def look(self, late: float = 0.0) -> None:
        """Note which workers are silent, and kill those that have been for too long. The supervisor was `late` with it
        by so many seconds, in which it read no message: workers are not blamed for these."""
        now = self._clock.now()
        for child in list(self._seated.values()):
            child.alive_at += late
            silent_for = now - child.alive_at
            child.is_silent = child.takes_requests and silent_for >= SILENT_AFTER
            if child.is_silent and silent_for >= KILL_SILENT_AFTER:
                said = "worker %d (%d): its event loop has been blocked for %.0f s; killing and replacing it"
                log.error(said, child.seat, child.pid, silent_for)
                child.kill()

    def kill(self) -> None:
        self._stopping = True
        for child in self.children.values():
            child.kill()

    async def _all_serve_with(self, given: Mapping[str, Any]) -> bool:
        """Of those that leave, the successors do."""
        number, asked = next(self._reloads), asyncio.get_running_loop().create_future
        children = [child for child in self._seated.values() if not child.leaving.is_set()]
        self._answers = {(child.number, number): asked() for child in children}
        self._hub.tell(Kind.SETTINGS, pickle.dumps((number, given)))
        if children:
            await asyncio.wait(self._answers.values(), timeout=RELOAD_TIMEOUT)
        return all(answer.done() and answer.result() for answer in self._answers.values())

    async def _look_for_silent_workers(self) -> None:
        while True:
            due = self._clock.now() + LOOK_EVERY
            await asyncio.sleep(LOOK_EVERY)
            late = self._clock.now() - due
            self.look(late if late > LOOK_EVERY else 0.0)

    async def _spawn(self, seat: int, given: Mapping[str, Any]) -> Child:
        """Once begun it comes to its end, or a process would be left that nobody knows."""
        start = self._tasks.start(self._start_worker(seat, given), f"start of worker {seat}")
        self._starting.add(start)
        start.add_done_callback(self._starting.discard)
        return await asyncio.shield(start)

    async def _start_worker(self, seat: int, given: Mapping[str, Any]) -> Child:
        ours, theirs = socket.socketpair()
        sockets, for_gateways = self._sockets[seat], self._for_gateways[seat]
        setup = Setup(
            given,
            next(self._numbers),
            theirs.fileno(),
            _numbers(sockets),
            self._directory,
            len(self._sockets),
            seat,
            _numbers(for_gateways),
        )
        with theirs:
            child = await Child.start(seat, setup, [*sockets, *for_gateways], theirs, self._clock.now())
        self.children[child.number] = child
        self._tasks.start(self._watch(child), f"watch of worker {seat}")
        await self._hub.attach(child.number, ours)
        return child

    async def _serves(self, child: Child) -> bool:
        async with Tasks() as tasks:
            either = (tasks.start(child.ready.wait(), "ready"), tasks.start(child.unlinked.wait(), "ended"))
            await asyncio.wait(either, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        return child.ready.is_set() and not child.unlinked.is_set()

    def _seat(self, child: Child) -> None:
        self._seated[child.seat] = child

    async def _watch(self, child: Child) -> None:
        """A successor is there as soon as a worker takes nobody new: in its queue somebody may be waiting."""
        await child.leaving.wait()
        for worker, number in self._answers:
            if worker == child.number:
                self.reloaded(worker, number, True)
        if not self._stopping and self._seated.get(child.seat) is child:
            del self._seated[child.seat]
            self._restarts.add()
            self._tasks.keep(lambda: self._succeed(child), "successor-of-a-worker", str(child.seat))
        code = await child.ended()
        del self.children[child.number]
        self._left(child)
        if code:
            log.error("worker %d (%d) %s", child.seat, child.pid, _how(code))

    async def _succeed(self, child: Child) -> None:
        pause = self._pause(child)
        log.error("worker %d (%d) leaves unasked; the next one starts in %.1f s", child.seat, child.pid, pause)
        while child.seat not in self._seated:
            await asyncio.sleep(pause)
            async with self._replacing:
                if self._stopping or child.seat in self._seated:
                    return
                try:
                    self._seat(await self._spawn(child.seat, self._given))
                except OSError as error:
                    pause = LONGEST_PAUSE
                    log.error("no worker can be started, the next try is in %.1f s: %s", pause, error)

    def _pause(self, child: Child) -> float:
        if self._clock.now() - child.started > SHORT_LIFE:
            self._short_lives[child.seat] = 0
            return 0.0
        lives = self._short_lives[child.seat] = self._short_lives.get(child.seat, 0) + 1
        return 0.0 if lives == 1 else min(LONGEST_PAUSE, 0.25 * 2.0 ** (lives - 1))


def _numbers(sockets: Sequence[socket.socket]) -> tuple[int, ...]:
    return tuple(sock.fileno() for sock in sockets)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
