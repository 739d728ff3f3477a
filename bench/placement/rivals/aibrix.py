"""AIBrix."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import mean, pstdev

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from bench.placement.rivals.sent import Sent
from proxy.lab.workload import Job


class PrefixCache(SimplePolicy):
    """`prefix-cache` as its charts configure it: the fewest in flight while pods are more than 16 requests apart; else
    the longest prefix whose pod is within two standard deviations of the mean; else the fewest in flight."""

    BLOCK, BLOCKS, APART, DEVIATIONS = 32, 200_000, 16, 2.0

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._sent = [Sent(self.BLOCK, self.BLOCKS / len(pods)) for _ in pods]

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        chosen = self._affine(job, candidates)
        if chosen is None:
            chosen = min(candidates, key=lambda pod: (self.in_flight[pod], self.rng.random()))
        self._sent[chosen].add(job)
        return chosen

    def _affine(self, job: Job, candidates: Sequence[int]) -> int | None:
        loads = [self.in_flight[pod] for pod in candidates]
        if max(loads) - min(loads) > self.APART:
            return None
        matched = {pod: self._sent[pod].matched(job) for pod in candidates}
        most = mean(loads) + self.DEVIATIONS * pstdev(loads)
        fit = [pod for pod in candidates if matched[pod] and self.in_flight[pod] <= most]
        return max(fit, key=lambda pod: (matched[pod], -self.in_flight[pod], self.rng.random()), default=None)
