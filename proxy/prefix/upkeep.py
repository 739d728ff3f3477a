"""What the prefix index forgets, and when: beyond a pod's capacity, long unused, or at the ceiling of its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

from proxy.core.endpoint import Endpoint
from proxy.prefix.forest import Forest
from proxy.prefix.holdings import Holding, PodMemory

WORK = 256
"""Holdings that one call clears or evicts at most for one reason: half a millisecond."""


class Upkeep:
    """Of the pods in `pods`. `due_at` is when the next call has to run it: at once after something was added, which
    the index sees to, and while something is left over; otherwise once a second."""

    def __init__(self, forest: Forest, pods: Mapping[Endpoint, PodMemory], ttl: float, max_bytes: float) -> None:
        self._forest = forest
        self._pods = pods
        self._ttl = ttl
        self.max_bytes = max_bytes
        self._expire_at = -math.inf
        self.due_at = -math.inf

    def expire_soon(self) -> None:
        self.due_at = self._expire_at = -math.inf

    def run(self, pod: PodMemory, now: float) -> None:
        """For what was done to this pod; in bounded steps: what is left over is done by later calls."""
        cleared = self._forest.clear(WORK)
        capacity = pod.capacity
        # What the pod computes on has no room for anything else; of that, prompts are pinned here, answers are not.
        pod.limit = min(capacity, pod.pinned + (1 - pod.endpoint.metrics.kv_usage) * capacity)
        if pod.blocks + pod.answered > pod.limit:
            self._evict(pod, pod.limit - min(capacity // 64, 512))
        if now >= self._expire_at:
            self._expire(now)
        if self._forest.bytes > self.max_bytes:
            self._shrink()
        done = cleared and self._forest.bytes <= self.max_bytes
        self.due_at = self._expire_at if done else -math.inf

    def _evict(self, pod: PodMemory, target: float) -> None:
        """Down to somewhat below the capacity, so that few segments are cut and most calls find nothing to do."""
        for _ in range(WORK):
            excess, holding = math.ceil(pod.blocks + pod.answered - target), pod.oldest
            if excess <= 0 or holding is None:
                return
            if holding.answer is not None:
                self._forest.drop_answer(holding.answer)
                continue
            segment = holding.segment
            kept = self._forest.fitting(segment.start, segment.blocks - excess)
            if kept > 0:
                self._forest.split(segment, kept)
            self._forest.drop(pod, holding)

    def _expire(self, now: float) -> None:
        work = WORK
        for pod in self._pods.values():
            gone = max(now - self._ttl, pod.horizon)
            while (oldest := pod.oldest) is not None and _used_at(oldest) <= gone:
                if not work:
                    return
                self._forest.drop(pod, oldest)
                work -= 1
        self._expire_at = now + min(1.0, self._ttl)

    def _shrink(self) -> None:
        """In batches from the pod with the oldest holding, since looking for that pod takes a step per pod."""
        for _ in range(8):
            victim = min(self._pods.values(), key=_age)
            for _ in range(WORK // 8):
                oldest = victim.oldest
                if oldest is None or self._forest.bytes <= self.max_bytes:
                    return
                self._forest.drop(victim, oldest)


def _age(pod: PodMemory) -> float:
    """When what the pod forgets next was used."""
    oldest = pod.oldest
    return _used_at(oldest) if oldest is not None else math.inf


def _used_at(holding: Holding) -> float:
    return holding.used_at if holding.used_at is not None else math.inf
