"""Ray Serve LLM."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from bench.placement.rivals.sent import Sent
from proxy.lab.workload import Job


class PrefixTree(SimplePolicy):
    """`PrefixCacheAffinityRouter` with its defaults: a pod that was sent the longest known prefix, if that is a tenth
    of the prompt; else one that was sent the least text. Queues do not count."""

    THRESHOLD = 0.1

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._sent = [Sent() for _ in pods]

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        matched = {pod: self._sent[pod].matched(job) for pod in candidates}
        longest = max(matched.values())
        if longest >= self.THRESHOLD * job.prompt_tokens:
            chosen = self.rng.choice([pod for pod in candidates if matched[pod] == longest])
        else:
            chosen = min(candidates, key=lambda pod: (self._sent[pod].entries, self.rng.random()))
        self._sent[chosen].add(job)
        return chosen
