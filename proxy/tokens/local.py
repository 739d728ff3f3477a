"""Token ids made here: at once for what is short, beside the event loop for what is not."""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Tokens
from proxy.core.processes import kill
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.tasks import Tasks
from proxy.core.tokens import LocalModel
from proxy.tokens.apart import LENGTH, framed
from proxy.tokens.chat import Uncertain
from proxy.tokens.model import Model

log = logging.getLogger(__name__)

AT_ONCE = 2048
"""Characters of text that no cache has: they take a millisecond. More go through a thread, since the tokenizer lets go
of the interpreter."""

LARGE = 64 * 1024
"""Bytes of a body that is read and rendered here. JSON and templates hold the interpreter, so what is larger goes to a
process of its own."""

MOST_WAITING = 4
"""Large bodies before one that is not waited for: their producers' time would be up."""

_BROKEN = (OSError, EOFError, pickle.UnpicklingError)


class LocalTokens(Tokens):
    """Raises ValueError, when made, for a model that cannot be read. The process for large bodies is started by the
    first one; `close` ends it."""

    def __init__(self, model: LocalModel, wall: Callable[[], float]) -> None:
        self._settings = model
        self._model = Model(model, wall)
        self._threads = ThreadPoolExecutor(1, "tokens")
        self._tasks = Tasks()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: Process | None = None

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        body = request.body
        parts = await (self._parts(request.path, body) if len(body) <= LARGE else self._apart(request.path, body))
        return Prompt(parts, request.prompt.salt) if parts else None

    async def close(self) -> None:
        await self._tasks.stop()
        await self._end()
        self._threads.shutdown(wait=False)

    async def _parts(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        model = self._model
        try:
            rendered = model.render(path, body)
        except Uncertain as reason:
            log.debug("a prompt that is not tokenised: %s", reason)
            return None
        pieces, found, new = model.known(rendered)
        if new <= AT_ONCE:
            return model.parts(rendered, pieces, found)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, model.parts, rendered, pieces, found)

    async def _apart(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        """What was begun is finished even if nobody waits any more: the process answers in order, and remembers."""
        if self._waiting >= MOST_WAITING:
            return None
        self._waiting += 1
        return await asyncio.shield(self._tasks.start(self._asked(path, body), "token ids of a large body"))

    async def _asked(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        try:
            async with self._turn:
                process = self._process = self._process or await _start(self._settings)
                return await _attempt(process, path, body)
        except _BROKEN as error:
            log.warning("the process that tokenises large bodies failed: %r", error)
            await self._end()
            return None
        finally:
            self._waiting -= 1

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await kill(process)


async def _start(settings: LocalModel) -> Process:
    """In a session of its own: a Ctrl-C that is meant for the proxy does not reach it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy.tokens.apart", stdin=PIPE, stdout=PIPE, limit=64 << 20, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(framed(settings))
    return process


async def _attempt(process: Process, path: str, body: bytes) -> tuple[bytes, ...] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(framed((path, body)))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
    parts: tuple[bytes, ...] | None = pickle.loads(await process.stdout.readexactly(size))
    return parts
