"""Pods that fail without a request to show it: health checks, and signs of life while a response is silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol

import orjson

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.errors import ConnectRefused, OutOfFiles, UpstreamFailed
from proxy.core.ports import Clock, Poster, Random
from proxy.core.tasks import Tasks
from proxy.reliability.breaker import Ejections
from proxy.reliability.settings import HealthSettings

UNHEALTHY, MUTE = "fails its health checks", "fails its inference checks"

NO_SUCH_PATH = (404, 405, 501)
"""Statuses of a pod that has no such check: it is not judged by it."""

Hook = Callable[[Endpoint], None]
Watch = Callable[[Hook, Hook], Callable[[], None]]
"""See `Fleet.watch`."""


class Asker(Poster, Protocol):
    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """Status and body. Raises ConnectRefused if nobody listens there, another UpstreamFailed if no whole answer
        came."""


class Streak:
    """So many failures after each other cast doubt, so many successes take it back."""

    def __init__(self, failures: int, successes: int) -> None:
        self._failures = failures
        self._successes = successes
        self._run = 0
        self.is_failing = False

    def add(self, good: bool) -> bool:
        """Whether that turned it."""
        if good is not self.is_failing:
            self._run = 0
            return False
        self._run += 1
        if self._run < (self._successes if self.is_failing else self._failures):
            return False
        self._run, self.is_failing = 0, not self.is_failing
        return True


class HealthChecks:
    """`async with HealthChecks(…)`: inside of it there is a loop for each pod. A pod that refuses connections is not
    judged: its scrapes see that at once, and when it is back too."""

    def __init__(
        self,
        settings: HealthSettings,
        watch: Watch,
        doubts: Ejections,
        asker: Asker,
        rng: Random,
        failed: Callable[[Endpoint, str], None],
        shortest: Callable[[Endpoint], float] = lambda _: 0.0,
    ) -> None:
        """`failed` is called for every check that failed, with the kind of it, `health` or `inference`; `shortest`
        returns the seconds that must lie between two checks of a pod."""
        self._settings = settings
        self._watch = watch
        self._doubts = doubts
        self._asker = asker
        self._rng = rng
        self._failed = failed
        self._shortest = shortest
        self._loops: dict[Endpoint, list[asyncio.Task[None]]] = {}
        self._tasks = Tasks()

    async def __aenter__(self) -> HealthChecks:
        self._unwatch = self._watch(self._added, self._removed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What it had against pods is taken back: nobody would any more."""
        self._unwatch()
        await self._tasks.stop()
        for endpoint in self._loops:
            for why in (UNHEALTHY, MUTE):
                self._doubts.uneject(endpoint, why)

    def _added(self, endpoint: Endpoint) -> None:
        if endpoint is not endpoint.lead:
            return
        settings, loops = self._settings, []
        if settings.path is not None:
            check = partial(self._is_well, endpoint, settings.path)
            loops.append(partial(self._loop, endpoint, "health", UNHEALTHY, check, settings.interval))
        if settings.inference is not None:
            check = partial(self._generates, endpoint, settings.inference.timeout)
            loops.append(partial(self._loop, endpoint, "inference", MUTE, check, settings.inference.interval))
        self._loops[endpoint] = [self._tasks.keep(loop, "health-checks", endpoint.name) for loop in loops]

    def _removed(self, endpoint: Endpoint) -> None:
        for task in self._loops.pop(endpoint, ()):
            task.cancel()

    async def _loop(
        self, endpoint: Endpoint, kind: str, why: str, check: Callable[[], object], interval: float
    ) -> None:
        streak = Streak(self._settings.failures, self._settings.successes)
        self._doubts.uneject(endpoint, why)  # a loop that failed and is started again knows nothing of the pod
        while True:
            pause = max(interval, self._shortest(endpoint))
            await asyncio.sleep(pause * (0.9 + 0.2 * self._rng.random()))
            try:
                good = await check()  # type: ignore[misc]
            except OutOfFiles:
                continue
            if good is None:
                streak, was = Streak(self._settings.failures, self._settings.successes), streak
                if was.is_failing:
                    self._doubts.uneject(endpoint, why)
                continue
            if not good:
                self._failed(endpoint, kind)
            if streak.add(good):
                (self._doubts.eject if streak.is_failing else self._doubts.uneject)(endpoint, why)

    async def _is_well(self, endpoint: Endpoint, path: str) -> bool | None:
        if endpoint.state is EndpointState.STARTING:
            return None
        try:
            async with asyncio.timeout(self._settings.timeout):
                status, _ = await self._asker.get(endpoint.url + path, endpoint.api_key)
        except ConnectRefused:
            return None
        except OutOfFiles:
            raise
        except (UpstreamFailed, TimeoutError):
            return False
        return None if status in NO_SUCH_PATH else 200 <= status < 300

    async def _generates(self, endpoint: Endpoint, timeout: float) -> bool | None:
        """A pod that has requests shows with them that it works, and lets this one wait behind them."""
        if endpoint.load.requests or endpoint.metrics.waiting or endpoint.state is EndpointState.STARTING:
            return None
        return await generates(endpoint, self._asker, timeout)


PATH = "/v1/completions"


async def generates(endpoint: Endpoint, poster: Poster, timeout: float) -> bool | None:
    """Whether the engine generates a token within so many seconds; None if it says that it does not take such
    requests, or names no model to ask for. Raises OutOfFiles, which says nothing of the engine."""
    models = (endpoint.models or frozenset()) - endpoint.adapters
    if not models:
        return None
    body = orjson.dumps({"model": min(models), "prompt": "1", "max_tokens": 1, "temperature": 0})
    try:
        async with asyncio.timeout(timeout):
            status, _ = await poster.post(endpoint.url + PATH, body, endpoint.api_key)
    except OutOfFiles:
        raise
    except (UpstreamFailed, TimeoutError):
        return False
    return None if 400 <= status < 500 else status == 200


log = logging.getLogger(__name__)

STALLED = "makes no progress"

SILENT = 5.0
"""Seconds without a byte after which an answer is not waited for, if there is reason to think that it will not come:
what a server finishes properly before it exits has bytes flowing."""

GAP = 5.0
"""Seconds after which nobody waits for the pod any more, if nobody has asked: what was seen before counts no more."""

LOOK_INTERVAL = 1.0
ASK_EVERY = 5
"""Looks; a pod that has nothing to do moves no counters, so it is given something."""

LONGEST = 300.0
"""Seconds of a doubt; then requests find out."""

Sight = tuple[float, float, int, int, float]


class Pods(Protocol):
    """`fleet.store.Fleet` is one."""

    def eject(self, endpoint: Endpoint, why: str) -> None: ...
    def uneject(self, endpoint: Endpoint, why: str) -> None: ...
    def lost_at(self, endpoint: Endpoint, sent_at: float) -> float | None: ...


@dataclass(slots=True)
class Stand:
    """What an engine's counters said when they were last seen to move, and the times, in monotonic seconds, of that
    scrape and of the last question about the pod."""

    sight: Sight
    scraped_at: float
    asked_at: float


class Liveness:
    """`async with Liveness(…)`. Asked by the sweep about every answer that has been silent for a while; costs nothing
    where none is.

    An engine stands still if for `stall` seconds somebody waits for it and none of its counters moves: neither tokens
    nor KV blocks nor its queue. A long prefill takes blocks as it goes on, so it is none.
    """

    def __init__(
        self,
        settings: HealthSettings,
        clock: Clock,
        pods: Pods,
        works: Callable[[Endpoint], Awaitable[bool | None]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`works`: whether the engine answers a question that it must work for."""
        self.settings = settings
        self._clock = clock
        self._pods = pods
        self._works = works
        self._sleep = sleep
        self._stands: dict[Endpoint, Stand] = {}
        self._stalled: dict[Endpoint, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    async def __aenter__(self) -> Liveness:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()

    def given_up(self, attempt: Attempt, heard_at: float) -> str:
        """Why an answer of which nothing has come since then is not to be waited for; empty if it is."""
        endpoint, now = attempt.endpoint, self._clock.now()
        lost_at = self._pods.lost_at(endpoint, attempt.started_at)
        if lost_at is not None:
            return "the pod is gone, and sends nothing" if now - max(lost_at, heard_at) >= SILENT else ""
        if endpoint not in self._stalled:
            self._look(endpoint, now)
        if endpoint in self._stalled and attempt.first_byte_at is None and now - heard_at >= SILENT:
            return "the pod's engine " + STALLED
        return ""

    def forget(self, endpoint: Endpoint) -> None:
        """It is gone, or another process answers."""
        self._stands.pop(endpoint, None)
        task = self._stalled.pop(endpoint, None)
        if task is not None:
            task.cancel()
            self._pods.uneject(endpoint, STALLED)

    def _look(self, endpoint: Endpoint, now: float) -> None:
        metrics = endpoint.metrics
        if metrics.progress < 0 or metrics.freshness is Freshness.STALE:
            self._stands.pop(endpoint, None)
            return
        stand, sight = self._stands.get(endpoint), _sight(metrics)
        if stand is None or stand.sight != sight or now - stand.asked_at > GAP:
            self._stands[endpoint] = Stand(sight, metrics.scraped_at, now)
            return
        stand.asked_at = now
        if metrics.scraped_at - stand.scraped_at >= self.settings.stall:
            del self._stands[endpoint]
            self._pods.eject(endpoint, STALLED)
            self._stalled[endpoint] = self._tasks.start(self._until_it_moves(endpoint, sight), f"{endpoint.name} moves")

    async def _until_it_moves(self, endpoint: Endpoint, sight: Sight) -> None:
        until, looks = self._clock.now() + LONGEST, 0
        while _sight(endpoint.metrics) == sight and self._clock.now() < until:
            await self._sleep(LOOK_INTERVAL)
            looks += 1
            if looks % ASK_EVERY == 0 and await self._works(endpoint):
                break
        self._stalled.pop(endpoint, None)
        self._pods.uneject(endpoint, STALLED)


def _sight(metrics: Metrics) -> Sight:
    return (metrics.progress, metrics.prefix_queries, metrics.waiting, metrics.running, metrics.kv_usage)
