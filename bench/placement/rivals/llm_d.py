"""llm-d's endpoint picker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Any

from bench.placement.pods import VirtualPod
from bench.placement.policy import SimplePolicy
from bench.placement.rivals.sent import Sent
from proxy.core.endpoint import Metrics
from proxy.lab.workload import Job

BLOCK = 64
"""Tokens of an entry in its index, whatever the engine's are."""


class EndpointPicker(SimplePolicy):
    """The default profile: prefix 3, queue 2, KV use 2, on the metrics of the last scrape, 50 ms apart; an index of
    what was sent to each pod, as many entries per pod as it has KV blocks; the best score, at random among equals.

    The queue counts relative to the others' and what waits only, KV use absolutely, so a pod that knows a share p of
    the prompt is preferred to all that do not, however long its queue, until its KV use is 1.5 p - 1 above theirs."""

    PREFIX, QUEUE, USAGE = 3.0, 2.0, 2.0
    scrapes = 0.05

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._readings: list[Metrics | None] = [None] * len(pods)
        self._sent = [Sent(BLOCK, pod.config.num_gpu_blocks) for pod in pods]
        self._predicted = 0
        self._of: dict[int, int] = {}

    def place(self, index: int, job: Job, now: float) -> int | None:
        chosen = super().place(index, job, now)
        self._of[index] = self._predicted
        return chosen

    def predicted(self, index: int) -> int | None:
        return self._of.pop(index, None)

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        matched = {pod: self._sent[pod].matched(job) for pod in candidates}
        scores = self._scores(job, matched)
        chosen = max(candidates, key=lambda pod: (scores[pod], self.rng.random()))
        self._predicted = matched[chosen]
        self._sent[chosen].add(job)
        return chosen

    def scraped(self, pod: int, reading: Metrics | None, sent: Any, sent_at: float) -> None:
        if reading is not None:
            self._readings[pod] = reading

    def _scores(self, job: Job, matched: dict[int, int]) -> dict[int, float]:
        waiting = {pod: reading.waiting if (reading := self._readings[pod]) else 0 for pod in matched}
        low, high = min(waiting.values()), max(waiting.values())
        total = -(-job.prompt_tokens // BLOCK)

        def score(pod: int) -> float:
            queue = 1.0 if high == low else (high - waiting[pod]) / (high - low)
            reading = self._readings[pod]
            usage = 1.0 - (reading.kv_usage if reading else 0.0)
            return self.PREFIX * -(-matched[pod] // BLOCK) / total + self.QUEUE * queue + self.USAGE * usage

        return {pod: score(pod) for pod in matched}


class Baseline(EndpointPicker):
    """Its `optimized-baseline`: the same and `no-hit-lru-scorer` 2, which sends a new prompt to the pod
    that has longest not been sent such a one."""

    NO_HIT = 2.0

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._cold: OrderedDict[int, None] = OrderedDict()
        """Pods that were sent one, the longest ago first."""

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        chosen = super().choose(job, candidates, now)
        if not self._predicted:
            self._cold[chosen] = None
            self._cold.move_to_end(chosen)
        return chosen

    def _scores(self, job: Job, matched: dict[int, int]) -> dict[int, float]:
        scores = super()._scores(job, matched)
        if any(matched.values()) or len(matched) == 1:
            return scores
        order = [pod for pod in matched if pod not in self._cold] + [pod for pod in self._cold if pod in matched]
        return {pod: scores[pod] + self.NO_HIT * (1 - order.index(pod) / (len(order) - 1)) for pod in matched}


class Affinity(EndpointPicker):
    """The profile of its guide for agents: `prefix-cache-affinity-filter`, which keeps the pods that know 0.8 of the
    prompt unless the others are 18 s ahead at 15,928 tokens per second, and `token-load-scorer`, on the uncached tokens
    in flight that have no first token."""

    AFFINITY, PENALTY, THROUGHPUT = 0.8, 18.0, 15_928.0
    scrapes = 0.0

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._tokens = [0] * len(pods)
        self._adds: dict[int, tuple[int, int]] = {}

    def place(self, index: int, job: Job, now: float) -> int | None:
        chosen = super().place(index, job, now)
        if chosen is not None:
            self._adds[index] = chosen, job.prompt_tokens - self._predicted
            self._tokens[chosen] += job.prompt_tokens - self._predicted
        return chosen

    def first_byte(self, index: int, now: float) -> None:
        if added := self._adds.pop(index, None):
            self._tokens[added[0]] -= added[1]

    def failed(self, index: int, now: float) -> int | None:
        self.first_byte(index, now)
        return super().failed(index, now)

    def _scores(self, job: Job, matched: dict[int, int]) -> dict[int, float]:
        sticky = {pod for pod in matched if matched[pod] >= self.AFFINITY * job.prompt_tokens}
        others = set(matched) - sticky
        if sticky and others:
            ahead = min(self._tokens[pod] for pod in sticky) - min(self._tokens[pod] for pod in others)
            if ahead / self.THROUGHPUT > self.PENALTY:
                sticky = set()
        kept = sticky or set(matched)
        return {
            pod: -(self._tokens[pod] + job.prompt_tokens - matched[pod]) if pod in kept else float("-inf")
            for pod in matched
        }
