"""Prefix warm-up: the most frequent system prompts of a pool are sent to a pod that is new or has lost its cache."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from math import exp

from xxhash import xxh3_128_digest

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import Clock, Random
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks, run_together
from proxy.fleet.settings import WarmupSettings
from proxy.openai.prompts import PromptHead, head

log = logging.getLogger(__name__)

TIMEOUT = 60.0
"""Time limit of one warm-up prompt on a pod, in seconds."""

CONCURRENCY = 2
"""Number of warm-up prompts that are sent to a pod at a time."""

STAGGER = 0.5
"""Seconds within which several workers start, each at a random time: a worker skips the prompts that another one has
sent."""


Send = Callable[[Endpoint, PromptHead], Awaitable[int | None]]
"""Send a prompt to a pod. Return the status of the response, None if the pod is known to have the prompt. Raise
UpstreamFailed."""


class Warmup:
    """Warms up pods, while they serve requests; an `async with` context. Warm-up prompts count as load."""

    def __init__(self, settings: WarmupSettings, prompts: SharedPrompts, send: Send, clock: Clock, rng: Random) -> None:
        self._settings = settings
        self._prompts = prompts
        self._send = send
        self._clock = clock
        self._rng = rng
        self._tasks = Tasks()
        self._running: set[Endpoint] = set()

    async def __aenter__(self) -> Warmup:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()

    def start(self, endpoint: Endpoint) -> None:
        """Warm up a pod that has nothing cached, unless that is already in progress."""
        if endpoint not in self._running and self._prompts.bytes:
            self._running.add(endpoint)
            self._tasks.start(self._warm(endpoint), f"warm-up of {endpoint.name}")

    async def _warm(self, endpoint: Endpoint) -> None:
        try:
            await asyncio.sleep(STAGGER * self._rng.random())
            began = self._clock.now()
            left = deque(self._prompts.hottest(endpoint.models))
            sent = sum(await run_together(*(self._send_in_turn(endpoint, left) for _ in range(CONCURRENCY))))
            if sent:
                log.info("pod %s: warmed up with %d prompts in %.1f s", endpoint.name, sent, self._clock.now() - began)
        finally:
            self._running.discard(endpoint)

    async def _send_in_turn(self, endpoint: Endpoint, left: deque[PromptHead]) -> int:
        """Send the prompts one after the other. Stop if the pod fails or rejects one."""
        sent = 0
        while left and endpoint.state is EndpointState.READY:
            try:
                status = await self._send(endpoint, left.popleft())
            except UpstreamFailed as error:
                status = 0
                log.warning("pod %s: stopped the warm-up: %s", endpoint.name, error)
            else:
                if status is not None and status >= 300:
                    log.warning("pod %s: stopped the warm-up: status %d", endpoint.name, status)
            if status is not None and not 200 <= status < 300:
                left.clear()
            elif status is not None:
                sent += 1
        return sent


MOST_COUNTED = 4096
"""Number of system prompts that are known only by digests, because too few requests begin with them."""

LARGEST_BODY = 256 * 1024
"""Largest body in bytes that is read; a larger one would delay other requests."""

SHARED_BY = 8
"""Number of different requests that begin with a system prompt before its text is kept."""

SAMPLE = 8
"""One of this many requests with a good response is read."""

MOST_BYTES = 4 << 20
"""Largest size of the kept prompts in bytes; beyond it the least used ones are dropped."""

MEMORY = 600.0
"""Time constant in seconds with which the weight of past requests decays."""


@dataclass(slots=True)
class _Counted:
    """`requests` are digests of the different requests with this system prompt, until there are enough of them; then
    `head` is the system prompt."""

    requests: set[bytes] = field(default_factory=set)
    head: PromptHead | None = None
    heat: float = 0.0
    at: float = 0.0


class SharedPrompts:
    """The system prompts of a pool and how often they are used. Of a prompt that too few requests begin with, only
    digests are kept."""

    def __init__(
        self,
        settings: WarmupSettings,
        clock: Clock,
        read: Callable[..., PromptHead | None] = head,
        *,
        shared_by: int = SHARED_BY,
        sample: int = SAMPLE,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.settings = settings
        self._shared_by = shared_by
        self._sample = sample
        self._most_bytes = most_bytes
        self._now = clock.now
        self._read = read
        self._unseen = 0
        self._heads: OrderedDict[bytes, _Counted] = OrderedDict()
        self.bytes = 0
        """Size of the kept texts in bytes."""

    def see(self, request: InferenceRequest) -> None:
        """Read the system prompt of one in `sample` requests with a good response."""
        self._unseen += 1
        if self._unseen < self._sample or not 0 < len(request.body) <= LARGEST_BODY:
            return
        self._unseen = 0
        found = self._read(request.path, request.model, request.body)
        if found is not None:
            self._count(found, request.body)

    def hottest(self, models: Set[str] | None) -> list[PromptHead]:
        """Return the most used prompts of each served model (None: any model), the most used first."""
        now, number = self._now(), dict[str, int]()
        chosen = []
        for counted in sorted(self._heads.values(), key=lambda counted: _heat(counted, now), reverse=True):
            prompt = counted.head
            if prompt is None or (models is not None and prompt.model not in models):
                continue
            number[prompt.model] = number.get(prompt.model, 0) + 1
            if number[prompt.model] <= self.settings.prompts:
                chosen.append(prompt)
        return chosen

    def _count(self, found: PromptHead, body: bytes) -> None:
        now, key = self._now(), xxh3_128_digest(found.path.encode() + found.body)
        counted = self._heads.setdefault(key, _Counted())
        self._heads.move_to_end(key)
        counted.heat, counted.at = _heat(counted, now) + 1.0, now
        if counted.head is None:
            counted.requests.add(xxh3_128_digest(body))
            if len(counted.requests) >= self._shared_by:
                counted.requests.clear()
                counted.head = found
                self.bytes += len(found.body)
        while len(self._heads) > MOST_COUNTED:
            self._drop(next(iter(self._heads)))
        while self.bytes > self._most_bytes:
            kept = ((_heat(one, now), key) for key, one in self._heads.items() if one.head)
            self._drop(min(kept)[1])

    def _drop(self, key: bytes) -> None:
        dropped = self._heads.pop(key)
        if dropped.head is not None:
            self.bytes -= len(dropped.head.body)


def _heat(counted: _Counted, now: float) -> float:
    """Decayed number of requests."""
    return counted.heat * exp((counted.at - now) / MEMORY)
