"""Requests between the supervisor and its workers: metrics, decisions, reloads, reads of models, signals."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from proxy.autoscale.signals import Signals, SignalSource
from proxy.cluster.messages import BROKER, FrameKind, record
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, NoEndpoints, NotFound, RequestError
from proxy.core.log_limit import LogLimit
from proxy.core.tasks import Tasks
from proxy.fleet.models import ModelReads
from proxy.http.admin_config import Explained
from proxy.scheduling.explained_log import DecisionQuery
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import SUPERVISOR, Catalogue, Dump, Merged
from proxy.telemetry.observation import Exposition, expose

if TYPE_CHECKING:
    from proxy.cluster.workers import Child

log = logging.getLogger(__name__)

METRICS_TIMEOUT = 2.0
"""Seconds to wait for the metrics, or the signals, of one worker."""

DECISIONS_TIMEOUT = 5.0
"""Seconds to wait for the decisions of one worker."""

MOST_OPEN = 256
"""Open questions of one process. Further ones are refused at once."""

METRICS, DECISIONS, SIGNALS, RELOAD, READ_MODELS, READ_POD = (
    "metrics",
    "decisions",
    "signals",
    "reload",
    "read-models",
    "read-pod",
)
"""Topics. The supervisor sends requests about the first four, workers about the others."""

_QUESTION = Struct("<I")
"""Number of the request; topic and argument follow as JSON."""
_REPLY = Struct("<I?")
"""Number of the question, and whether a reply follows, or an error."""

Handler = Callable[[Any], Awaitable[bytes]]


class WorkerUnreachable(Exception):
    """The other process sent no reply, or an error."""


class Questions:
    """Asks other processes of the host, and replies to them by `handlers`, which receive the argument, by topic.

    `send(address, message)` sends a record."""

    KINDS: ClassVar = frozenset((FrameKind.QUESTION, FrameKind.REPLY))

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._numbers = count(1)
        self._pending: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        """Own requests without a reply, by address and number."""
        self._tasks = Tasks()
        self._logs = LogLimit()
        self._open: Counter[int] = Counter()
        """Open questions by address."""
        self.handlers: dict[str, Handler] = {}

    async def ask(self, address: int, topic: str, argument: Any = None, timeout: float | None = None) -> bytes:
        """Send a request and return the reply. Raise WorkerUnreachable."""
        key = address, next(self._numbers)
        reply = self._pending[key] = asyncio.get_running_loop().create_future()
        self._send(address, record(FrameKind.QUESTION, _QUESTION.pack(key[1]) + orjson.dumps((topic, argument))))
        try:
            async with asyncio.timeout(timeout):
                return bytes(await reply)
        except TimeoutError:
            raise WorkerUnreachable(f"no reply within {timeout:g} s") from None
        finally:
            del self._pending[key]

    def receive(self, address: int, kind: FrameKind, body: bytes) -> None:
        """Raises InvalidMessage, or another of UNREADABLE."""
        if kind is FrameKind.QUESTION:
            (number,) = _QUESTION.unpack_from(body)
            topic, argument = orjson.loads(body[_QUESTION.size :])
            handler = self.handlers[topic]
            if self._open[address] >= MOST_OPEN:
                self._reply(address, number, False, b"too many questions at a time")
                return
            self._open[address] += 1
            self._tasks.start(self._work_on(address, number, handler(argument)), f"reply about {topic}")
            return
        number, has_reply = _REPLY.unpack_from(body)
        pending, reply = self._pending.get((address, number)), body[_REPLY.size :]
        if pending is None or pending.done():
            return
        if has_reply:
            pending.set_result(reply)
        else:
            pending.set_exception(WorkerUnreachable(reply.decode(errors="replace")))

    def forget(self, address: int) -> None:
        """The process is gone: it sends no more replies."""
        for (receiver, _), pending in self._pending.items():
            if receiver == address and not pending.done():
                pending.set_exception(WorkerUnreachable("the process has ended"))

    async def ask_all(
        self, workers: Iterable[Child], topic: str, argument: Any = None, timeout: float | None = None
    ) -> list[tuple[Child, bytes]]:
        """Return the replies. A worker that does not reply is left out, and logged."""

        async def reply(worker: Child) -> list[tuple[Child, bytes]]:
            try:
                return [(worker, await self.ask(worker.number, topic, argument, timeout or METRICS_TIMEOUT))]
            except WorkerUnreachable as error:
                log.warning("failed to fetch %s from worker %d: %s", topic, worker.seat, error)
                return []

        return [each for found in await asyncio.gather(*map(reply, workers)) for each in found]

    async def close(self) -> None:
        await self._tasks.stop()

    async def _work_on(self, address: int, number: int, work: Awaitable[bytes]) -> None:
        try:
            reply, has_failed = await work, False
        except Exception as error:
            if self._logs.allows(type(error)):
                log.exception("failed to reply to a process of this host (logged once a minute)")
            reply, has_failed = repr(error).encode(), True
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
        self._reply(address, number, not has_failed, reply)

    def _reply(self, address: int, number: int, has_reply: bool, reply: bytes) -> None:
        self._send(address, record(FrameKind.REPLY, _REPLY.pack(number, has_reply) + reply))


class HostExposition(Exposition):
    """The metrics of a host: the sums over its workers and the supervisor.

    A worker without a reply counts with its last reply. What workers counted that have ended stays in the sums:
    otherwise these would fall, and rates be wrong."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        questions: Questions,
        workers: Callable[[], Sequence[Child]],
        serving: Callable[[], int],
        readers: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(catalogue, endpoints, readers=readers)
        self._questions = questions
        self._workers = workers
        self._serving = serving
        self._ended: Dump = {}
        self._merging = asyncio.Lock()

    async def render(self, accept: str) -> tuple[bytes, str]:
        async with self._merging:
            await self._ask_all()
            self._catalogue.workers.cell().value = self._serving()
            return await expose(await self._merged({SUPERVISOR: await self.dump()}), accept)

    async def of_workers(self) -> list[Dump]:
        """Return the metrics of each worker."""
        async with self._merging:
            await self._ask_all()
            return [worker.metrics for worker in self._workers()]

    async def counted(self) -> Merged:
        """Return the sums over workers, including workers that have ended."""
        async with self._merging:
            await self._ask_all()
            return await self._merged({})

    def retire(self, worker: Child) -> None:
        """Keep the counts of a worker that has ended."""
        merged = Merged(self._catalogue)
        merged.add_counts(self._ended)
        self._ended = merged.add_counts(worker.metrics)

    async def _merged(self, own: Mapping[str, Dump]) -> Merged:
        """Merge `own`, by the label, with the metrics of all workers."""
        dumps = [
            *own.items(),
            *((str(worker.seat), worker.metrics) for worker in self._workers()),
            (SUPERVISOR, self._ended),
        ]
        merged = Merged(self._catalogue)
        for label, dump in dumps:
            await merged.add(dump, label)
        return merged

    async def _ask_all(self) -> None:
        receivers = [worker for worker in self._workers() if worker.replies]
        for worker, reply in await self._questions.ask_all(receivers, METRICS):
            worker.metrics = orjson.loads(reply)


async def decisions(explained: Explained, question: Any) -> bytes:
    """Return a worker's decisions: an HTTP status, and the content."""
    what, subject, query = question
    try:
        if what == "listed":
            return orjson.dumps((200, await explained.listed(query)))
        if what == "shown":
            return orjson.dumps((200, await explained.shown(subject)))
        return orjson.dumps((200, await explained.imagined(subject, query)))
    except RequestError as error:
        return orjson.dumps((error.status, {"message": str(error), "param": error.param}))


class WorkersDecisions:
    """The decisions of all workers, as `http.admin_config.Explained`. A worker without a reply is left out."""

    SUMMED = ("kept", "bytes", "seen")
    ERRORS: ClassVar[Mapping[int, type[RequestError]]] = {400: BadRequest, 404: NotFound}

    def __init__(self, questions: Questions, workers: Callable[[], Sequence[Child]]) -> None:
        self._questions = questions
        self._workers = workers

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decisions that match a query. Raise BadRequest."""
        limit = DecisionQuery.of(query).limit
        all_shown = [
            shown for status, shown in await self._ask(self._serving(), "listed", None, query) if status == 200
        ]
        if not all_shown:
            raise NoEndpoints("No worker responds.")
        found = sorted((one for shown in all_shown for one in shown["decisions"]), key=lambda one: -float(one["at"]))
        sums = {name: sum(shown[name] for shown in all_shown) for name in self.SUMMED if name in all_shown[0]}
        return {**all_shown[0], **sums, "decisions": found[:limit]}

    async def shown(self, name: str) -> Mapping[str, Any]:
        """Return one decision. Raise NotFound."""
        replies = await self._ask(self._serving(), "shown", name, {})
        found = [shown for status, shown in replies if status == 200]
        if not found:
            raise NotFound(replies[0][1]["message"] if replies else "No worker responds.")
        return dict(max(found, key=lambda shown: float(shown["at"])))

    async def imagined(self, trial: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decision that one of the workers would make: all know the same pods and each other's load. Raise
        RequestError."""
        for worker in self._serving():
            for status, shown in await self._ask([worker], "imagined", trial, query):
                if status == 200:
                    return dict(shown)
                raise self.ERRORS.get(status, RequestError)(shown["message"], param=shown["param"])
        raise NoEndpoints("No worker responds.")

    async def _ask(self, workers: Sequence[Child], what: str, subject: Any, query: Mapping[str, str]) -> list[Any]:
        argument = what, subject, dict(query)
        replies = await self._questions.ask_all(workers, DECISIONS, argument, DECISIONS_TIMEOUT)
        return [orjson.loads(reply) for _, reply in replies]

    def _serving(self) -> list[Child]:
        return [worker for worker in self._workers() if worker.takes_requests]


class WorkerModelReads(ModelReads):
    """Has the supervisor read the models of pods. What it finds is known here before its reply comes."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._tasks = Tasks()

    def next_round(self) -> asyncio.Future[None]:
        return self._tasks.start(self._ask(READ_MODELS, None), "models of all pods")

    def read_soon(self, endpoint: Endpoint) -> None:
        self._tasks.start(self._ask(READ_POD, endpoint.name), "models of a pod")

    async def _ask(self, topic: str, argument: str | None) -> None:
        try:
            await self._questions.ask(BROKER, topic, argument)
        except WorkerUnreachable as error:
            log.warning("the supervisor did not read the models of pods: %s", error)


class WorkerSignals(SignalSource):
    """The signals of all workers, added up. A worker without a reply counts with its last reply."""

    def __init__(self, catalogue: Catalogue, questions: Questions, workers: Callable[[], Sequence[Child]]) -> None:
        super().__init__(catalogue)
        self._questions = questions
        self._workers = workers
        self._last: dict[int, Signals] = {}

    async def update(self) -> None:
        workers = self._workers()
        receivers = [worker for worker in workers if worker.replies]
        for worker, reply in await self._questions.ask_all(receivers, SIGNALS):
            try:
                self._last[worker.number] = Signals.read(reply)
            except ValueError as error:
                log.warning("autoscale: unreadable signals of worker %d: %s", worker.seat, error)
        there = {worker.number for worker in workers}
        self._last = {number: signals for number, signals in self._last.items() if number in there}
        self.signals = Signals.sum(self._last.values())
