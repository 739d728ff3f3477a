"""sglang-router 0.3.2 and SMG."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from proxy.lab.workload import CHUNK, Job


class CacheAware(SimplePolicy):
    """`cache_aware` with the command line's defaults: affinity to the pod that was first sent the longest known prefix
    if that is over 0.3 of the prompt, else the fewest requests in flight; and the fewest in flight for all while the
    fleet is out of balance, by more than 64 requests and half as many again.

    Of several pods that were sent it, the program takes the first nearly always: see `bench/agreement.py`."""

    THRESHOLD = 0.3
    ABSOLUTE, RELATIVE = 64, 1.5

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._first_sent: dict[int, int] = {}

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        chosen = self.rng.choice(self.acceptable(job, candidates))
        self.remember(job, chosen)
        return chosen

    def acceptable(self, job: Job, candidates: Sequence[int]) -> list[int]:
        """Those it may choose; several if they are equally busy."""
        owner = self.owner(job, candidates)
        if owner is not None:
            return [owner]
        least = min(self.in_flight[pod] for pod in candidates)
        return [pod for pod in candidates if self.in_flight[pod] == least]

    def remember(self, job: Job, chosen: int) -> None:
        for node in job.nodes:
            self._first_sent.setdefault(node, chosen)

    def owner(self, job: Job, candidates: Sequence[int]) -> int | None:
        loads = [self.in_flight[pod] for pod in candidates]
        if max(loads) - min(loads) > self.ABSOLUTE and max(loads) > min(loads) * self.RELATIVE:
            return None
        matched, owner = 0, None
        for node in job.nodes:
            if node not in self._first_sent:
                break
            owner = self._first_sent[node]
            matched += CHUNK
        if min(matched, job.prompt_tokens) / job.prompt_tokens <= self.THRESHOLD:
            return None
        return owner if owner in candidates else candidates[0]
