"""Makes requests of bodies: at once, or in another process where that would hold up all other requests."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from proxy.core.errors import BodyTooLarge
from proxy.core.ports import Call
from proxy.core.processes import kill
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.openai.multipart import STEP, Form, is_multipart
from proxy.openai.parse import Parsed, parse
from proxy.openai.paths import model_in
from proxy.openai.weight import is_light
from proxy.parsing.wire import LENGTH, Question, Reply, assembled, framed
from proxy.reliability import deadline

log = logging.getLogger(__name__)

QUICK = 8 << 20
"""Bytes of a body that is parsed in 0.1 s mostly: larger ones leave one process to those."""

_UNREAD = 64 << 20
"""Bytes of an answer that may wait in the pipe's buffer."""

_TRIES = 2
"""A process may be killed for reasons that have nothing to do with the body that it parses."""

_BROKEN = (OSError, EOFError, pickle.UnpicklingError)

_NAMED_BY_QUERY = ("GET", "HEAD", "DELETE")
"""Methods of requests whose query names the model, whatever their body says."""


def parsed_at_once(call: Call) -> Parsed:
    """What has no body may name no model: any pod will do then. Raises BadRequest."""
    if call.method in _NAMED_BY_QUERY:
        return Parsed(model_in(call.query) or "", call.body)
    return parse(call.path, call.body, call.headers.get("content-type", ""))


def is_parsed_at_once(call: Call) -> bool:
    """Whether parsing the body holds up the event loop for a few milliseconds at most."""
    return call.method in _NAMED_BY_QUERY or is_light(call.body, call.headers.get("content-type", ""))


async def parsed_form(call: Call) -> Parsed:
    """A large form, or the beginning of one, in steps between which others are served. Raises BadRequest."""
    form = Form(call.headers.get("content-type", ""))
    for start in range(0, len(call.body), STEP):
        form.feed(call.body[start : start + STEP])
        await asyncio.sleep(0)
    if call.upload is None:
        form.finish()
    return Parsed(form.model, call.body)


def is_large_form(call: Call) -> bool:
    """Whether it is to be read by `parsed_form`."""
    if call.method in _NAMED_BY_QUERY:
        return False
    return call.upload is not None or (len(call.body) > STEP and is_multipart(call.headers.get("content-type", "")))


def question(call: Call) -> tuple[str, bytes, str]:
    """What there is to parse."""
    return call.path, call.body, call.headers.get("content-type", "")


def request_of(call: Call, parsed: Parsed, model: str, seconds: float) -> InferenceRequest:
    """`seconds` it has, unless its client gives it less. Raises BadRequest."""
    headers = call.headers
    if deadline.HEADER in headers:
        seconds = deadline.time_limit(headers, seconds)
    _, body, prompt, stream, max_tokens, _ = parsed
    priority, tenant, since = 0, "", call.received_at
    # By position: as keywords they would be put into a dictionary first, and take 6,300 instructions, not 3,000.
    return InferenceRequest(
        call.id, call.path, model, prompt, body, headers, stream, max_tokens, priority, tenant, since, since + seconds
    )


@dataclass(eq=False, slots=True)
class _Waiting:
    """A body that waits for a process."""

    size: int
    turn: asyncio.Future[_Worker]


@dataclass(eq=False, slots=True)
class _Worker:
    """A process for bodies of up to `limit` bytes, one at a time; started by the first one."""

    limit: float
    process: Process | None = None
    is_busy: bool = False


class BodyParser:
    """`async with BodyParser()`: processes that parse bodies, first come first served. Each is started by the first
    body that it parses, and ends with the context.

    One process takes any body, the other one those of up to QUICK bytes, so these do not wait for larger ones. A body
    whose client leaves is taken out of the queue; while it is parsed, a quick one is finished for nobody, and the
    process of a larger one is killed, so memory beyond the budget is bounded: QUICK bytes for each process here, and in
    the process what the values of one body take.
    """

    def __init__(self) -> None:
        self._tasks = Tasks()
        self._workers = (_Worker(QUICK), _Worker(math.inf))
        self._waiting: deque[_Waiting] = deque()
        self.given = 0
        """Bodies that processes were given."""

    async def __aenter__(self) -> BodyParser:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        for worker in self._workers:
            await _end(worker)

    @property
    def waiting(self) -> int:
        """Bodies that wait for a process."""
        return len(self._waiting)

    async def parse_apart(self, path: str, body: bytes, content_type: str) -> Parsed:
        """As `openai.parse`; raises what that raises, and BodyTooLarge for a body under which processes die."""
        asked = Question(path, content_type, len(body))
        for _ in range(_TRIES):
            worker = await self._acquire(len(body))
            exchange = self._tasks.start(self._exchanged(worker, asked, body), "a large body")
            try:
                answered: tuple[Reply, list[bytes]] | None = await asyncio.shield(exchange)
            except asyncio.CancelledError:
                if len(body) > QUICK:
                    exchange.cancel()
                raise
            if answered is not None:
                return assembled(*answered, body)
        raise BodyTooLarge("The request body takes too much memory to read.")

    async def _acquire(self, size: int) -> _Worker:
        """Return a process that is not busy, after all that wait for one as well. It is busy then."""
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

    async def _exchanged(self, worker: _Worker, question: Question, body: bytes) -> tuple[Reply, list[bytes]] | None:
        """None if the process died over it."""
        self.given += 1
        is_done = False
        try:
            process = worker.process = worker.process or await _start()
            answered = await _exchange(process, question, body)
            is_done = True
            return answered
        except _BROKEN as error:
            log.warning("the process that parses large bodies failed: %r", error)
            return None
        finally:
            try:
                if not is_done:
                    await _end(worker)
            finally:
                self._release(worker)


async def _end(worker: _Worker) -> None:
    """Kill the process, if there is one. Interrupted, it can be called again."""
    if worker.process is not None:
        await kill(worker.process)
        worker.process = None


async def _start() -> Process:
    """In a session of its own: a Ctrl-C that is meant for the proxy does not reach it."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy.parsing.apart", stdin=PIPE, stdout=PIPE, limit=_UNREAD, start_new_session=True
    )


async def _exchange(process: Process, question: Question, body: bytes) -> tuple[Reply, list[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(framed(question))
    process.stdin.write(body)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
    reply: Reply = pickle.loads(await process.stdout.readexactly(size))
    behind, start = await process.stdout.readexactly(sum(reply.sizes)), 0
    pieces = []
    for size in reply.sizes:
        pieces.append(behind[start : start + size])
        start += size
    return reply, pieces
