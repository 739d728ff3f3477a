"""Questions between the supervisor and its workers: metrics, decisions, reloads, reads of models, signals."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from struct import Struct
from typing import Any, ClassVar, Protocol

import orjson

from proxy.autoscale.signals import Signals, SignalSource
from proxy.cluster.messages import BROKER, Kind, record
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

log = logging.getLogger(__name__)

METRICS_TIMEOUT = 2.0
"""Seconds to wait for the metrics, or the signals, of one worker."""

DECISIONS_TIMEOUT = 5.0
"""Seconds to wait for the decisions of one worker."""

MOST_OPEN = 256
"""Questions of one process that are being answered. Further ones are refused at once."""

METRICS, DECISIONS, SIGNALS, RELOAD, READ_MODELS, READ_POD = (
    "metrics",
    "decisions",
    "signals",
    "reload",
    "read-models",
    "read-pod",
)
"""Topics. The supervisor asks about the first four, workers about the others."""

_QUESTION = Struct("<I")
"""Number of the question; topic and argument follow as JSON."""
_REPLY = Struct("<I?")
"""Number of the question, and whether it was answered; the reply follows."""

Handler = Callable[[Any], Awaitable[bytes]]


class Unanswered(Exception):
    """The other process did not answer, or could not."""


class Questions:
    """Asks other processes of the host, and answers them by `handlers`, which are given the argument, by topic.

    `send(address, message)` sends a record."""

    KINDS: ClassVar = frozenset((Kind.QUESTION, Kind.REPLY))

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._numbers = count(1)
        self._pending: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        """By address and number."""
        self._tasks = Tasks()
        self._logs = LogLimit()
        self._open: Counter[int] = Counter()
        """Questions that are being answered, by address."""
        self.handlers: dict[str, Handler] = {}

    async def ask(self, address: int, topic: str, argument: Any = None, timeout: float | None = None) -> bytes:
        """Return the reply. Raises Unanswered."""
        key = address, next(self._numbers)
        reply = self._pending[key] = asyncio.get_running_loop().create_future()
        self._send(address, record(Kind.QUESTION, _QUESTION.pack(key[1]) + orjson.dumps((topic, argument))))
        try:
            async with asyncio.timeout(timeout):
                return bytes(await reply)
        except TimeoutError:
            raise Unanswered(f"no reply within {timeout:g} s") from None
        finally:
            del self._pending[key]

    def take(self, address: int, kind: Kind, body: bytes) -> None:
        """Raises Garbled, or another of UNREADABLE."""
        if kind is Kind.QUESTION:
            (number,) = _QUESTION.unpack_from(body)
            topic, argument = orjson.loads(body[_QUESTION.size :])
            handler = self.handlers[topic]
            if self._open[address] >= MOST_OPEN:
                self._reply(address, number, False, b"too many questions at a time")
                return
            self._open[address] += 1
            self._tasks.start(self._answer(address, number, handler(argument)), f"answer about {topic}")
            return
        number, is_answered = _REPLY.unpack_from(body)
        pending, reply = self._pending.get((address, number)), body[_REPLY.size :]
        if pending is None or pending.done():
            return
        if is_answered:
            pending.set_result(reply)
        else:
            pending.set_exception(Unanswered(reply.decode(errors="replace")))

    def forget(self, address: int) -> None:
        """The process is gone: it answers nothing more."""
        for (asked, _), pending in self._pending.items():
            if asked == address and not pending.done():
                pending.set_exception(Unanswered("the process has ended"))

    async def close(self) -> None:
        await self._tasks.stop()

    async def _answer(self, address: int, number: int, answering: Awaitable[bytes]) -> None:
        try:
            reply, has_failed = await answering, False
        except Exception as error:
            if self._logs.allows(type(error)):
                log.exception("failed to answer a process of this host (logged once a minute)")
            reply, has_failed = repr(error).encode(), True
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
        self._reply(address, number, not has_failed, reply)

    def _reply(self, address: int, number: int, is_answered: bool, reply: bytes) -> None:
        self._send(address, record(Kind.REPLY, _REPLY.pack(number, is_answered) + reply))


class Asked(Protocol):
    """A worker as the supervisor sees it: `workers.Child`."""

    number: int
    seat: int
    metrics: Dump

    @property
    def takes_requests(self) -> bool: ...
    @property
    def answers(self) -> bool: ...


class HostExposition(Exposition):
    """The metrics of a host: the sums over its workers, and those of the supervisor.

    A worker that does not answer counts with its last answer. What workers counted that have ended stays in the sums:
    otherwise these would fall, and rates be wrong."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        questions: Questions,
        workers: Callable[[], Sequence[Asked]],
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

    def retire(self, worker: Asked) -> None:
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
        await asyncio.gather(*(self._ask(worker) for worker in self._workers() if worker.answers))

    async def _ask(self, worker: Asked) -> None:
        try:
            worker.metrics = orjson.loads(await self._questions.ask(worker.number, METRICS, timeout=METRICS_TIMEOUT))
        except Unanswered as error:
            log.warning("failed to fetch metrics from worker %d: %s", worker.seat, error)


async def decisions(explained: Explained, asked: Any) -> bytes:
    """Return a worker's answer about its decisions: an HTTP status, and what is shown."""
    what, subject, query = asked
    try:
        if what == "listed":
            return orjson.dumps((200, await explained.listed(query)))
        if what == "shown":
            return orjson.dumps((200, await explained.shown(subject)))
        return orjson.dumps((200, await explained.imagined(subject, query)))
    except RequestError as error:
        return orjson.dumps((error.status, {"message": str(error), "param": error.param}))


class WorkersDecisions:
    """The decisions of all workers, as `http.admin_config.Explained`. A worker that does not answer is left out."""

    SUMMED = ("kept", "bytes", "seen")
    ERRORS: ClassVar[Mapping[int, type[RequestError]]] = {400: BadRequest, 404: NotFound}

    def __init__(self, questions: Questions, workers: Callable[[], Sequence[Asked]]) -> None:
        self._questions = questions
        self._workers = workers

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises BadRequest."""
        limit = DecisionQuery.of(query).limit
        all_shown = [shown for status, shown in await self._ask_all("listed", None, query) if status == 200]
        if not all_shown:
            raise NoEndpoints("No worker answers.")
        found = sorted((one for shown in all_shown for one in shown["decisions"]), key=lambda one: -float(one["at"]))
        sums = {name: sum(shown[name] for shown in all_shown) for name in self.SUMMED if name in all_shown[0]}
        return {**all_shown[0], **sums, "decisions": found[:limit]}

    async def shown(self, name: str) -> Mapping[str, Any]:
        """Raises NotFound."""
        answers = await self._ask_all("shown", name, {})
        found = [shown for status, shown in answers if status == 200]
        if not found:
            raise NotFound(answers[0][1]["message"] if answers else "No worker answers.")
        return dict(max(found, key=lambda shown: float(shown["at"])))

    async def imagined(self, asked: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return what one of the workers would decide: they know the same pods and each other's load. Raises
        RequestError."""
        for worker in self._serving():
            answer = await self._ask(worker, "imagined", asked, query)
            if answer is not None:
                status, shown = answer
                if status == 200:
                    return dict(shown)
                raise self.ERRORS.get(status, RequestError)(shown["message"], param=shown["param"])
        raise NoEndpoints("No worker answers.")

    async def _ask_all(self, what: str, subject: Any, query: Mapping[str, str]) -> list[tuple[int, Any]]:
        answers = await asyncio.gather(*(self._ask(worker, what, subject, query) for worker in self._serving()))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, worker: Asked, what: str, subject: Any, query: Mapping[str, str]) -> tuple[int, Any] | None:
        try:
            argument = what, subject, dict(query)
            status, shown = orjson.loads(
                await self._questions.ask(worker.number, DECISIONS, argument, DECISIONS_TIMEOUT)
            )
            return status, shown
        except Unanswered as error:
            log.warning("failed to fetch decisions from worker %d: %s", worker.seat, error)
            return None

    def _serving(self) -> list[Asked]:
        return [worker for worker in self._workers() if worker.takes_requests]


class WorkerModelReads(ModelReads):
    """Has the supervisor read the models of pods. What it finds is known here before its answer comes."""

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
        except Unanswered as error:
            log.warning("the supervisor did not read the models of pods: %s", error)


class WorkerSignals(SignalSource):
    """The signals of all workers, added up. A worker that does not answer counts with its last answer."""

    def __init__(self, catalogue: Catalogue, questions: Questions, workers: Callable[[], Sequence[Asked]]) -> None:
        super().__init__(catalogue)
        self._questions = questions
        self._workers = workers
        self._last: dict[int, Signals] = {}

    async def update(self) -> None:
        workers = self._workers()
        await asyncio.gather(*(self._ask(worker) for worker in workers if worker.answers))
        there = {worker.number for worker in workers}
        self._last = {number: signals for number, signals in self._last.items() if number in there}
        self.signals = Signals.sum(self._last.values())

    async def _ask(self, worker: Asked) -> None:
        try:
            reply = await self._questions.ask(worker.number, SIGNALS, timeout=METRICS_TIMEOUT)
            self._last[worker.number] = Signals.read(reply)
        except (Unanswered, ValueError) as error:
            log.warning("autoscale: failed to fetch the signals of worker %d: %s", worker.seat, error)
