"""Other routers' policies, re-expressed from what is known of them, at the granularity of the trace's blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Any

from bench.placement.pods import Reading, VirtualPod
from bench.placement.policy import SimplePolicy
from bench.placement.workload import CHUNK, Job


class CacheAware(SimplePolicy):
    """sglang-router and SMG, `cache_aware` with the command line's defaults: affinity to the pod that was last sent the
    longest known prefix if that is over 0.3 of the prompt, else the fewest requests in flight; and the fewest in flight
    for all while the fleet is out of balance, by more than 64 requests and half as many again."""

    THRESHOLD = 0.3
    ABSOLUTE, RELATIVE = 64, 1.5

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._last_sent: dict[int, int] = {}

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        chosen = self._affine(job, candidates)
        if chosen is None:
            chosen = min(candidates, key=lambda pod: (self.in_flight[pod], self.rng.random()))
        for node in job.nodes:
            self._last_sent[node] = chosen
        return chosen

    def _affine(self, job: Job, candidates: Sequence[int]) -> int | None:
        loads = [self.in_flight[pod] for pod in candidates]
        if max(loads) - min(loads) > self.ABSOLUTE and max(loads) > min(loads) * self.RELATIVE:
            return None
        matched, owner = 0, None
        for node in job.nodes:
            if node not in self._last_sent:
                break
            owner = self._last_sent[node]
            matched += CHUNK
        if min(matched, job.prompt_tokens) / job.prompt_tokens <= self.THRESHOLD:
            return None
        return owner if owner in candidates else candidates[0]


class EndpointPicker(SimplePolicy):
    """llm-d's default profile: prefix 3, queue 2, KV use 2, on the metrics of the last scrape, 50 ms apart; an index of
    what was sent to each pod, as many entries per pod as it has KV blocks; the best score, at random among equals.

    The reference indexes blocks of 64 tokens and counts its capacity in the engine's blocks; here a chunk of 512
    stands for eight of them."""

    WEIGHTS = (3.0, 2.0, 2.0)
    INDEX_BLOCK = 64
    scrapes = 0.05

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._readings: list[Reading | None] = [None] * len(pods)
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in pods]
        self._predicted = 0
        self._of: dict[int, int] = {}

    def place(self, index: int, job: Job, now: float) -> int | None:
        chosen = super().place(index, job, now)
        self._of[index] = self._predicted
        return chosen

    def predicted(self, index: int) -> int | None:
        return self._of.pop(index, None)

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        prefix_weight, queue_weight, usage_weight = self.WEIGHTS
        matches = {pod: self._matched(pod, job) for pod in candidates}
        waiting = {pod: reading.waiting if (reading := self._readings[pod]) else 0 for pod in candidates}
        low, high = min(waiting.values()), max(waiting.values())

        def score(pod: int) -> float:
            queue = 1.0 if high == low else (high - waiting[pod]) / (high - low)
            reading = self._readings[pod]
            usage = 1.0 - (reading.kv_usage if reading else 0.0)
            return prefix_weight * matches[pod] / len(job.nodes) + queue_weight * queue + usage_weight * usage

        chosen = max(candidates, key=lambda pod: (score(pod), self.rng.random()))
        self._predicted = min(matches[chosen] * CHUNK, job.prompt_tokens)
        self._remember(chosen, job)
        return chosen

    def scraped(self, pod: int, reading: Reading | None, sent: Any, sent_at: float) -> None:
        if reading is not None:
            self._readings[pod] = reading

    def _matched(self, pod: int, job: Job) -> int:
        held = self._held[pod]
        return next((at for at, node in enumerate(job.nodes) if node not in held), len(job.nodes))

    def _remember(self, pod: int, job: Job) -> None:
        held = self._held[pod]
        for node in job.nodes:
            held[node] = None
            held.move_to_end(node)
        while len(held) > self.pods[pod].config.num_gpu_blocks * self.INDEX_BLOCK // CHUNK:
            held.popitem(last=False)
