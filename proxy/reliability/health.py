"""Active health checks, and the detection of hung engines while a response sends nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import orjson

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.errors import ConnectRefused, OutOfFiles, UpstreamFailed
from proxy.core.ports import Clock, Poster, Random
from proxy.core.tasks import Tasks
from proxy.fleet.store import Fleet
from proxy.reliability.settings import HealthSettings

log = logging.getLogger(__name__)


UNHEALTHY, FAILS_INFERENCE = "fails its health checks", "fails its inference checks"

NO_SUCH_PATH = (404, 405, 501)
"""Statuses of a pod without the check; they neither eject nor return a pod."""

Hook = Callable[[Endpoint], None]
Watch = Callable[[Hook, Hook], Callable[[], None]]
"""See `Fleet.watch`."""


class HealthClient(Poster, Protocol):
    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """Return status and body. Raise ConnectRefused if no process listens there, another UpstreamFailed if no
        complete response arrives."""


@dataclass(slots=True)
class Streak:
    """Counts consecutive results: `failures` in a row turn it to failing, `successes` in a row turn it back."""

    failures: int
    successes: int
    is_failing: bool = False
    _run: int = 0

    def add(self, good: bool) -> bool:
        """Add a result. Return whether `is_failing` has changed."""
        if good is not self.is_failing:
            self._run = 0
            return False
        self._run += 1
        if self._run < (self.successes if self.is_failing else self.failures):
            return False
        self._run, self.is_failing = 0, not self.is_failing
        return True


@dataclass(eq=False)
class HealthChecks:
    """A loop of health checks per pod, which runs inside `async with HealthChecks(…)`. Refused connections are left to
    the scrapes, which notice them and the return of the pod at once."""

    settings: HealthSettings
    watch: Watch
    ejections: Fleet
    client: HealthClient
    rng: Random
    failed: Callable[[Endpoint, str], None]
    """Called with each failed check and its kind, `health` or `inference`."""
    shortest: Callable[[Endpoint], float] = lambda _: 0.0
    """Return the minimum seconds between two checks of a pod."""
    refused: Hook = lambda _: None
    """Called for a pod that refuses connections."""
    _loops: dict[Endpoint, list[asyncio.Task[None]]] = field(init=False, default_factory=dict)
    _tasks: Tasks = field(init=False, default_factory=Tasks)

    async def __aenter__(self) -> HealthChecks:
        self._unwatch = self.watch(self._added, self._removed)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the loops and end the ejections by these checks."""
        self._unwatch()
        await self._tasks.stop()
        for endpoint in self._loops:
            for why in (UNHEALTHY, FAILS_INFERENCE):
                self.ejections.uneject(endpoint, why)

    def _added(self, endpoint: Endpoint) -> None:
        if endpoint is not endpoint.first_rank:
            return
        settings, loops = self.settings, []
        if settings.path is not None:
            check = partial(self._is_healthy, endpoint, settings.path)
            loops.append(partial(self._loop, endpoint, "health", UNHEALTHY, check, settings.interval))
        if settings.inference is not None:
            check = partial(self._generates, endpoint, settings.inference.timeout)
            loops.append(
                partial(self._loop, endpoint, "inference", FAILS_INFERENCE, check, settings.inference.interval)
            )
        self._loops[endpoint] = [self._tasks.keep(loop, "health-checks", endpoint.name) for loop in loops]

    def _removed(self, endpoint: Endpoint) -> None:
        for task in self._loops.pop(endpoint, ()):
            task.cancel()

    async def _loop(
        self, endpoint: Endpoint, kind: str, why: str, check: Callable[[bool], Awaitable[bool | None]], interval: float
    ) -> None:
        streak = Streak(self.settings.failures, self.settings.successes)
        self.ejections.uneject(endpoint, why)  # a restarted loop begins without results
        while True:
            pause = max(interval, self.shortest(endpoint))
            await asyncio.sleep(pause * (0.9 + 0.2 * self.rng.random()))
            try:
                good = await check(streak.is_failing)
            except OutOfFiles:
                continue
            if good is None:
                streak, was = Streak(self.settings.failures, self.settings.successes), streak
                if was.is_failing:
                    self.ejections.uneject(endpoint, why)
                continue
            if not good:
                self.failed(endpoint, kind)
            if streak.add(good):
                (self.ejections.eject if streak.is_failing else self.ejections.uneject)(endpoint, why)

    async def _is_healthy(self, endpoint: Endpoint, path: str, is_failing: bool) -> bool | None:
        if endpoint.state is EndpointState.STARTING:
            return None
        try:
            async with asyncio.timeout(self.settings.timeout):
                status, _ = await self.client.get(endpoint.url + path, endpoint.api_key)
        except ConnectRefused:
            self.refused(endpoint)
            return None
        except OutOfFiles:
            raise
        except (UpstreamFailed, TimeoutError):
            return False
        return None if status in NO_SUCH_PATH else 200 <= status < 300

    async def _generates(self, endpoint: Endpoint, timeout: float, is_failing: bool) -> bool | None:
        """Check an idle pod, or one that fails. The requests of another pod show that it works, and would delay the
        check."""
        is_busy = endpoint.load.requests or endpoint.metrics.waiting
        if endpoint.state is EndpointState.STARTING or (is_busy and not is_failing):
            return None
        return await generates(endpoint, self.client, timeout)


PATH = "/v1/completions"


async def generates(endpoint: Endpoint, poster: Poster, timeout: float, rank: int | None = None) -> bool | None:
    """Return whether the engine, on the given data-parallel rank or on any, generates a token within `timeout` seconds;
    None if it does not serve completions or lists no model. Raise OutOfFiles, which is no failure of the engine."""
    models = (endpoint.models or frozenset()) - endpoint.adapters
    if not models:
        return None
    body = orjson.dumps({"model": min(models), "prompt": "1", "max_tokens": 1, "temperature": 0})
    try:
        async with asyncio.timeout(timeout):
            status, _ = await poster.post(endpoint.url + PATH, body, endpoint.api_key, rank)
    except OutOfFiles:
        raise
    except (UpstreamFailed, TimeoutError):
        return False
    return None if 400 <= status < 500 else status == 200


STALLED = "makes no progress"
UNREACHABLE = "the pod refuses connections or was restarted, and sends nothing"

SILENT = 5.0
"""Seconds without a byte after which a response of a pod that refuses connections, was restarted or hangs is given up.
A server that finishes its responses before it exits keeps sending bytes."""

GAP = 5.0
"""Seconds without a check of a silent response after which earlier observations of its pod are discarded."""

CHECK_INTERVAL = 1.0
CHECKS_PER_PROBE = 5
"""An idle pod changes no counters, so every fifth check sends it a request."""

LONGEST = 300.0
"""Longest ejection of a hung engine in seconds; then requests show whether it works."""

Counters = tuple[float, float, int, int, float]


@dataclass(slots=True)
class Progress:
    """The counters of an engine when they last changed. Times are monotonic seconds: of that scrape, and of the last
    check of a response of the pod."""

    counters: Counters
    scraped_at: float
    checked_at: float


@dataclass(eq=False)
class Liveness:
    """Detects hung engines. `reason_to_give_up` is called for each response that has sent nothing for a while, so other
    responses cost nothing. Tasks run inside `async with Liveness(…)`.

    An engine is hung if none of its counters (tokens, KV blocks, queue) changes for `stall` seconds while a request
    waits for it. A long prefill allocates blocks as it proceeds, so it does not count as hung.
    """

    settings: HealthSettings
    clock: Clock
    pods: Fleet
    works: Callable[[Endpoint], Awaitable[bool | None]]
    """Return whether the engine serves a request."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _progress: dict[Endpoint, Progress] = field(init=False, default_factory=dict)
    _stalled: dict[Endpoint, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _tasks: Tasks = field(init=False, default_factory=Tasks)

    async def __aenter__(self) -> Liveness:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()

    def reason_to_give_up(self, attempt: Attempt, silent_since: float) -> str:
        """Return why to give up a response that has sent nothing since `silent_since`; empty to keep waiting."""
        endpoint, now = attempt.endpoint, self.clock.now()
        lost_at = self.pods.lost_at(endpoint, attempt.started_at)
        if lost_at is not None:
            return UNREACHABLE if now - max(lost_at, silent_since) >= SILENT else ""
        if endpoint not in self._stalled and endpoint.state is not EndpointState.GONE:
            self._check(endpoint, now)
        if endpoint in self._stalled and attempt.first_byte_at is None and now - silent_since >= SILENT:
            return "the pod's engine " + STALLED
        return ""

    def forget(self, endpoint: Endpoint) -> None:
        """Drop the state of a pod that was removed or whose process was replaced."""
        self._progress.pop(endpoint, None)
        if endpoint in self._stalled:
            self._stalled[endpoint].cancel()
            self._moved(endpoint)

    def _check(self, endpoint: Endpoint, now: float) -> None:
        metrics = endpoint.metrics
        if metrics.progress < 0 or metrics.freshness is Freshness.STALE:
            self._progress.pop(endpoint, None)
            return
        progress, counters = self._progress.get(endpoint), _counters(metrics)
        if progress is None or progress.counters != counters or now - progress.checked_at > GAP:
            self._progress[endpoint] = Progress(counters, metrics.scraped_at, now)
            return
        progress.checked_at = now
        if metrics.scraped_at - progress.scraped_at >= self.settings.stall:
            del self._progress[endpoint]
            self.pods.eject(endpoint, STALLED)
            self._stalled[endpoint] = self._tasks.start(
                self._until_progress(endpoint, counters), f"{endpoint.name} moves"
            )

    async def _until_progress(self, endpoint: Endpoint, counters: Counters) -> None:
        until, checks = self.clock.now() + LONGEST, 0
        while _counters(endpoint.metrics) == counters and self.clock.now() < until:
            await self.sleep(CHECK_INTERVAL)
            checks += 1
            if checks % CHECKS_PER_PROBE == 0 and await self.works(endpoint):
                break
        self._moved(endpoint)

    def _moved(self, endpoint: Endpoint) -> None:
        """Return the pod to service, unless another of its ranks hangs."""
        self._stalled.pop(endpoint, None)
        if not any(rank in self._stalled for rank in endpoint.ranks):
            self.pods.uneject(endpoint, STALLED)


def _counters(metrics: Metrics) -> Counters:
    return (metrics.progress, metrics.prefix_queries, metrics.waiting, metrics.running, metrics.kv_usage)
