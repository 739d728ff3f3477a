"""Makes requests of bodies: at once, or in a process of its own where that would hold up all other requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from types import TracebackType

from proxy.core.ports import Call
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.openai.parse import Parsed, parse
from proxy.openai.paths import model_in
from proxy.parsing.wire import LENGTH, Question, Reply, assembled, framed
from proxy.reliability import deadline

log = logging.getLogger(__name__)

LARGE = 256 * 1024
"""Bytes. A body takes 4 us per KiB as one text and up to 15 as many small objects, and no thread can help, for the
parser holds the interpreter: so what is read at once takes 4 ms at most, where 8 MiB would take 30 to 120."""

_UNREAD = 64 << 20
"""Bytes of an answer that may wait in the pipe's buffer."""

_BROKEN = (OSError, EOFError, pickle.UnpicklingError)


def parsed_at_once(call: Call) -> Parsed:
    """What has no body may name no model: any pod will do then. Raises BadRequest."""
    if call.method in ("GET", "HEAD", "DELETE"):
        return Parsed(model_in(call.query) or "", call.body)
    return parse(call.path, call.body, call.headers.get("content-type", ""))


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


class BodyParser:
    """`async with BodyParser()`: the process is started by the first large body, and ends with the context.

    It takes one body at a time. If it dies, the body that it had is read here, and the next one starts another.
    """

    def __init__(self) -> None:
        self._tasks = Tasks()
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def __aenter__(self) -> BodyParser:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        await self._end()

    async def parse_apart(self, path: str, body: bytes, content_type: str) -> Parsed:
        """As `openai.parse`; raises what that raises. What was begun is finished even if nobody waits for it any more:
        the process answers in order."""
        asked = self._tasks.start(self._asked(Question(path, content_type, len(body)), body), "a large body")
        answered: tuple[Reply, list[bytes]] | None = await asyncio.shield(asked)
        return parse(path, body, content_type) if answered is None else assembled(*answered, body)

    async def _asked(self, question: Question, body: bytes) -> tuple[Reply, list[bytes]] | None:
        """None if the process died over it."""
        async with self._turn:
            try:
                process = self._process = self._process or await _start()
                return await _exchange(process, question, body)
            except _BROKEN as error:
                log.warning("the process that reads large bodies failed: %r", error)
                await self._end()
                return None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to hear of it
                    process.kill()
            await process.wait()


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
    return reply, [await process.stdout.readexactly(size) for size in reply.sizes]
