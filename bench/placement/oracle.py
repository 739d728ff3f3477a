"""The greedy oracle: it knows the cache and the queue of every pod, and takes the pod with the least predicted TTFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from proxy.lab.engine import CountedRequest
from proxy.lab.workload import Job, prompt_blocks


class Oracle(SimplePolicy):
    """Plays each pod's engine forward, all lengths known, until the request would have its first token."""

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._cached: dict[int, int] = {}
        self._placing = -1
        self.expected: dict[int, float] = {}
        """When each request should have its first token."""

    def place(self, index: int, job: Job, now: float) -> int | None:
        self._placing = index
        return super().place(index, job, now)

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        newcomer = CountedRequest(
            -1, job.prompt_tokens, job.output_tokens, prompt_blocks(job, self.pods[0].config.block_size)
        )
        best, chosen, cached = math.inf, candidates[0], 0
        shuffled = sorted(candidates, key=lambda at: (len(self.pods[at].engine.waiting), self.rng.random()))
        for at in shuffled:
            first_token, found = self.pods[at].foresee(newcomer, now, best)
            if first_token < best:
                best, chosen, cached = first_token, at, found
        self._cached[self._placing], self.expected[self._placing] = cached, best
        return chosen

    def predicted(self, index: int) -> int | None:
        return self._cached.get(index)
