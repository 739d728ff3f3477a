"""Consistent hashing, of the session or of the prompt's beginning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from random import Random

from xxhash import xxh3_64_intdigest

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from proxy.lab.workload import Job


class _Ring:
    """Pods on a circle, each at `points` places."""

    def __init__(self, pods: int, points: int) -> None:
        self._points = sorted((_hash(f"pod {pod} point {at}"), pod) for pod in range(pods) for at in range(points))

    def pods(self, key: str) -> list[int]:
        """All of them, in the order in which they come after the key."""
        start = bisect_left(self._points, (_hash(key), -1))
        return list(dict.fromkeys(pod for _, pod in self._points[start:] + self._points[:start]))


class SessionHash(SimplePolicy):
    """vllm-router's `consistent_hash`, 160 points to the pod; production-stack's `session` is alike. Without a session
    the body is hashed. If the pod is unreachable, the next one."""

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._ring = _Ring(len(pods), 160)

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        chosen = self._ring.pods(job.session or f"{job.ids} {job.prompt_tokens}")[0]
        return chosen if chosen in candidates else candidates[0]


class BoundedPrefixHash(SimplePolicy):
    """SMG's `prefix_hash`: the first 256 tokens, 150 points to the pod; the fewest in flight if the pod has more than
    1.25 times the mean. KubeAI's hashing with bounded loads is alike."""

    TOKENS, BOUND = 256, 1.25

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._ring = _Ring(len(pods), 150)

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        key = f"{job.ids[0]} {min(self.TOKENS, job.prompt_tokens)}"
        chosen = next(pod for pod in self._ring.pods(key) if pod in candidates)
        mean = (sum(self.in_flight) + 1) / len(candidates)
        if self.in_flight[chosen] + 1 <= ceil(self.BOUND * mean):
            return chosen
        return min(candidates, key=lambda pod: (self.in_flight[pod], self.rng.random()))


def _hash(text: str) -> int:
    return xxh3_64_intdigest(text.encode())
