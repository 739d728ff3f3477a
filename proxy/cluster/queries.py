"""Questions between the supervisor and its workers: metrics, decisions, model reads and signals for the autoscaler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from proxy import outbound
from proxy.autoscale.measures import Buckets, Known, ScaledPools
from proxy.cluster.workers import Child
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, NoEndpoints, NotFound, RequestError
from proxy.fleet.models import ModelReads
from proxy.scheduling.explained_log import Wanted
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.exposition import SUPERVISOR, Merger, Sample, SampleReader, sums_by
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Exposition

log = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds for the response of one worker."""

ADDED = ("kept", "bytes", "seen")

_ERRORS: Mapping[int, type[RequestError]] = {400: BadRequest, 404: NotFound}

Said = tuple[int, Any]
"""Status and JSON."""


class WorkersDecisions:
    """Implements `http.admin_decisions.Explained`. One that does not answer is left out."""

    def __init__(self, children: Callable[[], Sequence[Child]]) -> None:
        self._children = children

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises BadRequest."""
        limit = Wanted.of(query).limit
        all_said = [said for status, said in await self._all("/debug/decisions", query) if status == 200]
        if not all_said:
            raise NoEndpoints("No worker answers.")
        decisions = sorted((one for said in all_said for one in said["decisions"]), key=lambda one: -float(one["at"]))
        sums = {name: sum(said[name] for said in all_said) for name in ADDED if name in all_said[0]}
        return {**all_said[0], **sums, "decisions": decisions[:limit]}

    async def shown(self, name: str) -> Mapping[str, Any]:
        """Raises NotFound."""
        answers = await self._all(f"/debug/decisions/{name}", {})
        found = [said for status, said in answers if status == 200]
        if not found:
            raise NotFound(answers[0][1]["error"]["message"] if answers else "No worker answers.")
        return dict(max(found, key=lambda said: float(said["at"])))

    async def imagined(self, asked: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """By one of them: they know the same pods, and tell each other what they do there. Raises RequestError."""
        for child in self._ready():
            answer = await _ask(child, "/debug/explain", query, orjson.dumps(asked))
            if answer is not None:
                status, said = answer
                if status == 200:
                    return dict(said)
                raise _ERRORS.get(status, RequestError)(said["error"]["message"], param=said["error"]["param"])
        raise NoEndpoints("No worker answers.")

    async def _all(self, path: str, query: Mapping[str, str]) -> list[Said]:
        answers = await asyncio.gather(*(_ask(child, path, query) for child in self._ready()))
        return [answer for answer in answers if answer is not None]

    def _ready(self) -> list[Child]:
        return [child for child in self._children() if child.ready.is_set() and not child.leaving.is_set()]


async def _ask(child: Child, path: str, query: Mapping[str, str], body: bytes | None = None) -> Said | None:
    """None if it does not answer."""
    method = "GET" if body is None else "POST"
    url, socket_path = f"http://worker{path}", child.metrics_path
    try:
        response = await outbound.fetch(method, url, TIMEOUT, socket_path=socket_path, params=dict(query), data=body)
        return response.status, orjson.loads(response.body)
    except (*outbound.FAILURES, orjson.JSONDecodeError) as error:
        log.warning("failed to fetch decisions from worker %d: %r", child.seat, error)
        return None


METRICS_TIMEOUT = 2.0
"""Seconds for the exposition of one worker."""


class HostExposition(Exposition):
    """Asks every worker; one that does not answer counts with what it said last. What workers had counted that are
    gone stays in the sums, or these would fall, and rates be wrong."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        children: Callable[[], Sequence[Child]],
        serving: Callable[[], int],
        readers: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(catalogue, endpoints, readers=readers)
        self._children = children
        self._serving = serving
        self._gone = b""
        self._merging = asyncio.Lock()

    async def render(self, accept: str) -> tuple[bytes, str]:
        async with self._merging:
            await asyncio.gather(*map(_scrape, self._children()))
            self._catalogue.workers.cell().value = self._serving()
            own, _ = await super().render("")
            said = [(child.exposition, str(child.seat)) for child in self._children()]
            gone, merged = self._gone, Merger()
            await merged.add(own, SUPERVISOR)
            for exposition, worker in said:
                await merged.add(exposition, worker)
            await merged.add(gone, SUPERVISOR)
            return await merged.render(), CONTENT_TYPE_PLAIN_0_0_4

    async def of_workers(self) -> list[bytes]:
        """What each of them shows."""
        async with self._merging:
            await asyncio.gather(*map(_scrape, self._children()))
            return [child.exposition for child in self._children()]

    async def counted(self) -> list[bytes]:
        """As `of_workers`, and what those had counted that are gone."""
        return [*await self.of_workers(), self._gone]

    def retire(self, child: Child) -> None:
        """A worker is gone; what it counted is not."""
        self._gone = Merger.counts_of(self._gone, child.exposition)


async def _scrape(child: Child) -> None:
    if not child.ready.is_set() or child.is_silent:
        return
    try:
        response = await outbound.fetch("GET", "http://worker/metrics", METRICS_TIMEOUT, socket_path=child.metrics_path)
        child.exposition = response.body
    except outbound.FAILURES as error:
        log.warning("failed to fetch metrics from worker %d: %r", child.seat, error)


class WorkerModelReads(ModelReads):
    """A worker's side."""

    def __init__(self, ask_for_round: Callable[[int], None], ask_for_pod: Callable[[str], None]) -> None:
        """`ask_for_round` is given a number, which comes back when the round is over."""
        self._ask_for_round = ask_for_round
        self._ask_for_pod = ask_for_pod
        self._number = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """In the order of their numbers."""

    def next_round(self) -> asyncio.Future[None]:
        """Every request has a number of its own: only the supervisor knows which round had begun when it asked."""
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._ask_for_round(self._number)
        return future

    def read_soon(self, endpoint: Endpoint) -> None:
        self._ask_for_pod(endpoint.name)

    def over(self, number: int) -> None:
        """The round is over for all requests up to this number."""
        for waiting in [waiting for waiting in self._waiting if waiting <= number]:
            self._waiting.pop(waiting).set_result(None)


class RoundsForWorkers:
    """The supervisor's side."""

    def __init__(self, reads: ModelReads, tell: Callable[[Mapping[int, int]], None]) -> None:
        """`tell` says to all workers up to which number, by worker, a round is over."""
        self._reads = reads
        self._tell = tell
        self._asked: dict[asyncio.Future[None], dict[int, int]] = {}
        """The last number of each worker, by the round that it waits for."""

    def ask(self, worker: int, number: int) -> None:
        over = self._reads.next_round()
        if over not in self._asked:
            self._asked[over] = {}
            over.add_done_callback(self._over)
        self._asked[over][worker] = number

    def _over(self, over: asyncio.Future[None]) -> None:
        """What the round has found was told before."""
        self._tell(self._asked.pop(over))


_TTFT, _BACKLOG, _QUEUE = (
    "kvlane_autoscale_time_to_first_token_seconds_bucket",
    "kvlane_autoscale_prefill_backlog_seconds",
    "kvlane_queue_requests",
)
_READER = SampleReader((_TTFT, _BACKLOG, _QUEUE))

Role = tuple[str, str]
"""Pool and role."""


class Shown:
    """The sums over the expositions of all workers."""

    def __init__(self, expositions: Iterable[bytes] = ()) -> None:
        samples: dict[str, list[Sample]] = {}
        for exposition in expositions:
            for name, found in _READER.read(exposition).items():
                samples.setdefault(name, []).extend(found)
        queued = sums_by(samples.get(_QUEUE, ()), ("pool",))
        backlogs = sums_by(samples.get(_BACKLOG, ()), ("pool", "role"))
        self.queued = {pool: int(number) for (pool,), number in queued.items()}
        """Waiting requests by pool."""
        self.backlogs: dict[Role, float] = {(pool, role): seconds for (pool, role), seconds in backlogs.items()}
        self._buckets: dict[Role, list[tuple[float, float]]] = {}
        for (pool, role, bound), count in sums_by(samples.get(_TTFT, ()), ("pool", "role", "le")).items():
            self._buckets.setdefault((pool, role), []).append((float(bound), count))

    def ttfts(self, role: Role) -> Buckets:
        return sorted(self._buckets.get(role, ()))


class WorkersSenses(ScaledPools):
    """Senses of the autoscaler. `ask` gives what every worker shows."""

    def __init__(self, catalogue: Catalogue, ask: Callable[[], Awaitable[Iterable[bytes]]]) -> None:
        super().__init__()
        self._catalogue = catalogue
        self._ask = ask
        self._shown = Shown()

    async def look(self) -> None:
        self._shown = Shown(await self._ask())

    def known(self, pool: str, role: str, now: float) -> Known:
        found, key = self._shown, (pool, role)
        ttft = self.recent(pool, role, now, found.ttfts(key))
        return Known(found.queued.get(pool, 0), found.backlogs.get(key), ttft)

    def read(self) -> None:
        """For an exposition."""
        gauge = self._catalogue.prefill_backlog
        gauge.clear()
        for role, backlog in self._shown.backlogs.items():
            if role in self.roles:
                gauge.cell(*role).value = backlog
