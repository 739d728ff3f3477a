"""Questions of one process of a host to another, and the replies."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, ClassVar

import orjson

from proxy.cluster.messages import RecordKind, record
from proxy.core.errors import BadRequest, NotFound, RequestError
from proxy.core.log_limit import LogLimit
from proxy.core.tasks import Tasks

log = logging.getLogger(__name__)

MOST_OPEN = 256
"""Largest number of open questions of one process; further ones are refused."""

Handler = Callable[..., Awaitable[Any]]

_Error = tuple[int | None, str, str | None]
"""Status, message and field of a RequestError; None for the status of another error."""

_ERRORS: dict[int, type[RequestError]] = {400: BadRequest, 404: NotFound}


class QuestionFailed(Exception):
    """The other process sent no reply, or an error."""


class Questions:
    """Asks other processes of the host, and replies to them by `handlers`, by topic. Arguments and results are JSON
    values.

    `send(address, message)` sends a record."""

    KINDS: ClassVar = frozenset((RecordKind.QUESTION, RecordKind.REPLY))

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._numbers = count(1)
        self._pending: dict[tuple[int, int], asyncio.Future[Any]] = {}
        """Own questions without a reply, by address and number."""
        self._tasks = Tasks()
        self._logs = LogLimit()
        self._open: Counter[int] = Counter()
        """Open questions by address."""
        self.handlers: dict[str, Handler] = {}

    async def ask(self, address: int, topic: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Return what the handler of the other process returns. Raise QuestionFailed, or the RequestError of the
        handler."""
        key = address, next(self._numbers)
        reply = self._pending[key] = asyncio.get_running_loop().create_future()
        self._send(address, record(RecordKind.QUESTION, orjson.dumps((key[1], topic, arguments))))
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            raise QuestionFailed(f"no reply within {timeout:g} s") from None
        finally:
            del self._pending[key]

    def receive(self, address: int, kind: RecordKind, body: bytes) -> None:
        """Raises one of UNREADABLE."""
        if kind is RecordKind.QUESTION:
            number, topic, arguments = orjson.loads(body)
            handler = self.handlers[topic]
            if self._open[address] >= MOST_OPEN:
                self._reply(address, number, None, (None, "too many questions at a time", None))
                return
            work = handler(*arguments)
            self._open[address] += 1
            self._tasks.start(self._work_on(address, number, work), f"reply about {topic}")
            return
        number, result, error = orjson.loads(body)
        pending = self._pending.get((address, number))
        if pending is None or pending.done():
            return
        if error is None:
            pending.set_result(result)
            return
        status, message, param = error
        if status is None:
            pending.set_exception(QuestionFailed(message))
        else:
            pending.set_exception(_ERRORS.get(status, RequestError)(message, param=param))

    def forget(self, address: int) -> None:
        """Handle the end of a process, which sends no more replies."""
        for (receiver, _), pending in self._pending.items():
            if receiver == address and not pending.done():
                pending.set_exception(QuestionFailed("the process has ended"))

    async def close(self) -> None:
        await self._tasks.stop()

    async def _work_on(self, address: int, number: int, work: Awaitable[Any]) -> None:
        result: Any = None
        error: _Error | None = None
        try:
            result = await work
        except RequestError as refusal:
            error = refusal.status, refusal.message, refusal.param
        except Exception as fault:
            if self._logs.allows(type(fault)):
                log.exception("failed to reply to a process of this host (logged once a minute)")
            error = None, repr(fault), None
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
        self._reply(address, number, result, error)

    def _reply(self, address: int, number: int, result: Any, error: _Error | None) -> None:
        self._send(address, record(RecordKind.REPLY, orjson.dumps((number, result, error))))
