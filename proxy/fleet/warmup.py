"""Sends a pod that comes, or came back empty, the system prompts that its siblings are asked about most."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import TracebackType
from typing import Protocol

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.warmup_prompts import SharedPrompts
from proxy.openai.heads import Head

log = logging.getLogger(__name__)

TIMEOUT = 60.0
"""Seconds for a pod to compute one prompt of a warm-up."""

STAGGER = 0.5
"""Seconds within which several workers begin, each at a moment of its own: what one has sent the next leaves out."""


class Sender(Protocol):
    """How one prompt reaches a pod and the books."""

    async def send(self, endpoint: Endpoint, prompt: Head) -> int | None:
        """The status of the answer; None if the pod is known to have the prompt. Raises UpstreamFailed."""


class Warmup:
    """`async with`: inside of it pods are warmed up, while they take traffic: what they are sent counts as load."""

    def __init__(
        self, settings: WarmupSettings, prompts: SharedPrompts, sender: Sender, clock: Clock, rng: Random
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._sender = sender
        self._clock = clock
        self._rng = rng
        self._tasks = Tasks()
        self._warming: set[Endpoint] = set()

    async def __aenter__(self) -> Warmup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()

    def begin(self, endpoint: Endpoint) -> None:
        """The pod has nothing cached. It is warmed up once at a time."""
        if endpoint not in self._warming and self._prompts.bytes:
            self._warming.add(endpoint)
            self._tasks.start(self._warm(endpoint), f"warm-up of {endpoint.name}")

    async def _warm(self, endpoint: Endpoint) -> None:
        try:
            await asyncio.sleep(STAGGER * self._rng.random())
            began = self._clock.now()
            left = deque(self._prompts.hottest(endpoint.models))
            async with asyncio.TaskGroup() as group:
                lanes = [group.create_task(self._lane(endpoint, left)) for _ in range(self._settings.concurrency)]
            sent = sum(lane.result() for lane in lanes)
            if sent:
                log.info("pod %s: warmed up with %d prompts in %.1f s", endpoint.name, sent, self._clock.now() - began)
        finally:
            self._warming.discard(endpoint)

    async def _lane(self, endpoint: Endpoint, left: deque[Head]) -> int:
        """One after the other, until nothing is left, or the pod does not take them: it has other worries then."""
        sent = 0
        while left and endpoint.state is EndpointState.READY:
            try:
                status = await self._sender.send(endpoint, left.popleft())
            except UpstreamFailed as error:
                status = 0
                log.warning("pod %s: the warm-up ends: %s", endpoint.name, error)
            else:
                if status is not None and status >= 300:
                    log.warning("pod %s: the warm-up ends: it answered %d", endpoint.name, status)
            if status is not None and not 200 <= status < 300:
                left.clear()
            elif status is not None:
                sent += 1
        return sent
