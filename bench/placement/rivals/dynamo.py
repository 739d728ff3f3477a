"""NVIDIA Dynamo's KV router."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from proxy.lab.workload import Job, prompt_blocks


class KvRouter(SimplePolicy):
    """The least of: blocks that wait for their prefill there, with this prompt's that are not cached, plus blocks in
    use by what decodes, with this prompt's. What is cached it knows from the engines' events: here from the engines
    themselves, at once."""

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._prefilling = [0] * len(pods)
        self._decoding = [0] * len(pods)
        self._booked: dict[int, tuple[int, int, int]] = {}
        """Request -> (pod, blocks to prefill, blocks of the prompt)."""
        self._cached: dict[int, int] = {}
        self._placing = -1

    def place(self, index: int, job: Job, now: float) -> int | None:
        self._placing = index
        return super().place(index, job, now)

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        size = self.pods[0].config.block_size
        named, blocks = prompt_blocks(job, size), -(-job.prompt_tokens // size)
        cached = {pod: self.pods[pod].engine.pool.match(named, blocks) for pod in candidates}

        def cost(pod: int) -> int:
            return self._prefilling[pod] + blocks - cached[pod] + self._decoding[pod] + blocks

        chosen = min(candidates, key=lambda pod: (cost(pod), self.rng.random()))
        self._prefilling[chosen] += blocks - cached[chosen]
        self._decoding[chosen] += blocks
        self._booked[self._placing] = chosen, blocks - cached[chosen], blocks
        self._cached[self._placing] = cached[chosen] * size
        return chosen

    def first_byte(self, index: int, now: float) -> None:
        pod, prefill, blocks = self._booked[index]
        self._prefilling[pod] -= prefill
        self._booked[index] = pod, 0, blocks

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        super().ended(index, now, cached_tokens)
        self._release(index)

    def failed(self, index: int, now: float) -> int | None:
        self._release(index)
        return super().failed(index, now)

    def predicted(self, index: int) -> int | None:
        return self._cached.pop(index, None)

    def _release(self, index: int) -> None:
        pod, prefill, blocks = self._booked.pop(index)
        self._prefilling[pod] -= prefill
        self._decoding[pod] -= blocks
