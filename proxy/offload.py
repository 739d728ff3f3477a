"""Work in other processes: pools of helper processes that reply to questions, and the loop that they run.

A message is a length of eight bytes (little-endian), a pickle of a small value with the sizes of large pieces, and the
pieces behind it as they are: packing them too would copy each twice more. Both ends are this program, so the pickle may
be trusted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from proxy.core.tasks import Tasks

log = logging.getLogger(__name__)

LENGTH = 8

_UNREAD = 64 << 20
"""Bytes of a response that may wait in the pipe's buffer."""

_BROKEN = (OSError, EOFError, pickle.UnpicklingError)

Message = tuple[Any, list[bytes]]
"""A small value and large pieces."""

Reply = Callable[[Any, bytes], tuple[Any, Sequence[bytes]]]
"""Question and body -> value and pieces."""


def serve(prepare: Callable[[Any], Reply]) -> None:
    """Run a helper process: process requests from standard input in sequence until it ends. The first message is the
    setup of the pool, from which `prepare` makes the handler."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    reply: Reply | None = None
    while header := source.read(LENGTH):
        value, pieces = _read(source, int.from_bytes(header, "little"))
        if reply is None:
            reply = prepare(value)
            continue
        target.writelines(_packed(*reply(value, pieces[0])))
        target.flush()


@dataclass(eq=False, slots=True)
class _Waiting:
    size: int
    turn: asyncio.Future[_Worker]


@dataclass(eq=False, slots=True)
class _Worker:
    """A process for bodies of up to `limit` bytes, one at a time; started by the first one."""

    limit: float
    process: Process | None = None
    is_busy: bool = False


class OffloadPool:
    """Helper processes inside `async with OffloadPool(...)`. Each is started by its first body. Bodies are served in
    order of arrival. A body whose caller leaves is removed from the queue; if it is being processed, the result is
    discarded, so that the process keeps its caches, except that the process of a body of more than `kill_above` bytes
    is killed."""

    def __init__(
        self, module: str, setup: object = None, limits: Sequence[float] = (math.inf,), kill_above: float = math.inf
    ) -> None:
        """`module` calls `serve`, `setup` is its first message, and `limits` are the largest bodies of each process."""
        self._module = module
        self._setup = setup
        self._kill_above = kill_above
        self._tasks = Tasks()
        self._workers = tuple(map(_Worker, limits))
        self._waiting: deque[_Waiting] = deque()
        self.given = 0
        """Number of bodies that were passed to processes."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._tasks.stop()
        for worker in self._workers:
            await _end(worker)

    @property
    def waiting(self) -> int:
        """Number of bodies that wait for a process."""
        return len(self._waiting)

    @property
    def pending(self) -> int:
        """Number of bodies that wait or are being processed."""
        return len(self._waiting) + sum(worker.is_busy for worker in self._workers)

    async def ask(self, question: object, body: bytes) -> Message | None:
        """Return the result, or None if the process died."""
        worker = await self._acquire(len(body))
        exchange = self._tasks.start(self._exchanged(worker, question, body), "a body in another process")
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if len(body) > self._kill_above:
                exchange.cancel()
            raise

    async def _acquire(self, size: int) -> _Worker:
        """Wait for an idle process and mark it busy."""
        waiting = _Waiting(size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._assign()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.turn.cancelled():
                self._release(waiting.turn.result())
            raise

    def _assign(self) -> None:
        for worker in self._workers:
            if not worker.is_busy:
                fitting = (each for each in self._waiting if each.size <= worker.limit and not each.turn.cancelled())
                waiting = next(fitting, None)
                if waiting is not None:
                    self._waiting.remove(waiting)
                    worker.is_busy = True
                    waiting.turn.set_result(worker)

    def _release(self, worker: _Worker) -> None:
        worker.is_busy = False
        self._assign()

    async def _exchanged(self, worker: _Worker, question: object, body: bytes) -> Message | None:
        self.given += 1
        is_done = False
        try:
            process = worker.process = worker.process or await self._start()
            reply = await _exchange(process, question, body)
            is_done = True
            return reply
        except _BROKEN as error:
            log.warning("the helper process %s failed: %r", self._module, error)
            return None
        finally:
            try:
                if not is_done:
                    await _end(worker)
            finally:
                self._release(worker)

    async def _start(self) -> Process:
        """Start a process in a session of its own, so that Ctrl-C for the proxy does not reach it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=PIPE, stdout=PIPE, limit=_UNREAD, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.writelines(_packed(self._setup, ()))
        return process


async def kill(process: Process) -> None:
    """Kill the process and wait for its end. Interrupted, it can be called again."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to notice
            process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
        with contextlib.suppress(OSError):  # of what was not written; asyncio logs the error if nothing retrieves it
            await process.stdin.wait_closed()


async def _end(worker: _Worker) -> None:
    """Kill the process, if there is one. Interrupted, it can be called again."""
    if worker.process is not None:
        await kill(worker.process)
        worker.process = None


async def _exchange(process: Process, question: object, body: bytes) -> Message:
    assert process.stdin is not None
    assert process.stdout is not None
    frame, piece = _packed(question, (body,))
    process.stdin.write(frame)
    process.stdin.write(piece)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
    value, sizes = pickle.loads(await process.stdout.readexactly(size))
    return value, _split(await process.stdout.readexactly(sum(sizes)), sizes)


def _packed(value: object, pieces: Sequence[bytes]) -> list[bytes]:
    packed = pickle.dumps((value, list(map(len, pieces))), pickle.HIGHEST_PROTOCOL)
    return [len(packed).to_bytes(LENGTH, "little") + packed, *pieces]


def _read(source: IO[bytes], size: int) -> Message:
    value, sizes = pickle.loads(source.read(size))
    return value, _split(source.read(sum(sizes)), sizes)


def _split(behind: bytes, sizes: Sequence[int]) -> list[bytes]:
    if len(sizes) == 1:
        return [behind]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(behind[start : start + size])
        start += size
    return pieces
