"""Answers that will not come: of pods that are gone without a word, and of engines that stand still behind a server
that says all is well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.reliability.settings import HealthSettings

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
