"""Health checks of every pod, and the smallest request that an engine must work for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol

import orjson

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import ConnectRefused, OutOfFiles, UpstreamFailed
from proxy.core.ports import Poster, Random
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
