"""vLLM production-stack."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from bench.placement.rivals.sent import Sent
from proxy.lab.workload import Job

PREFIX_BLOCK = 32
"""Tokens: 128 characters."""


class PrefixAware(SimplePolicy):
    """`prefixaware`: any of the pods that were ever sent the longest known prefix, whatever else they have to do;
    nothing is forgotten."""

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self.sent = [Sent(PREFIX_BLOCK) for _ in pods]

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        matched = {pod: self.sent[pod].matched(job) for pod in candidates}
        chosen = max(candidates, key=lambda pod: (self.score(job, matched[pod], pod), self.rng.random()))
        self.sent[chosen].add(job)
        return chosen

    def score(self, job: Job, matched: int, pod: int) -> float:
        return matched


class LoadAware(PrefixAware):
    """`loadaware`: the share of the prompt that a pod was sent, less its requests in flight above the mean, as a share
    of the mean."""

    def score(self, job: Job, matched: int, pod: int) -> float:
        mean = sum(self.in_flight) / len(self.in_flight)
        return matched / job.prompt_tokens - (self.in_flight[pod] - mean) / max(1.0, mean)
