"""The routers that need no knowledge of prompts. What the simulation asks of a router: see `proxy.lab.simulation`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from bench.placement.pods import VirtualPod
from proxy.lab.sim.driver import InternalBalancer
from proxy.lab.simulation import Policy
from proxy.lab.workload import Job

__all__ = ["EngineBalancer", "LeastRequests", "Policy", "PowerOfTwo", "RandomChoice", "RoundRobin", "SimplePolicy"]


class SimplePolicy(Policy):
    """Counts what it has in flight on every pod, forgets a request that fails, and looks at no metrics."""

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        self.pods = pods
        self.rng = rng
        self.in_flight = [0] * len(pods)
        self._on: dict[int, int] = {}
        self._answering: set[int] = set()

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        raise NotImplementedError

    def place(self, index: int, job: Job, now: float) -> int | None:
        candidates = [pod.index for pod in self.pods if pod.up]
        if not candidates:
            return None
        pod = self.choose(job, candidates, now)
        self.in_flight[pod] += 1
        self._on[index] = pod
        return pod

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        self.in_flight[self._on.pop(index)] -= 1

    def failed(self, index: int, now: float) -> int | None:
        self.in_flight[self._on.pop(index)] -= 1
        return None


class RoundRobin(SimplePolicy):
    _next = 0

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        self._next += 1
        return candidates[self._next % len(candidates)]


class RandomChoice(SimplePolicy):
    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        return self.rng.choice(candidates)


class LeastRequests(SimplePolicy):
    """The fewest in flight, at random among equals."""

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        return min(candidates, key=lambda pod: (self.in_flight[pod], self.rng.random()))


class EngineBalancer(SimplePolicy):
    """The pod with the fewest requests in flight, and on it the rank that vLLM's internal balancer takes."""

    def __init__(self, pods: Sequence[VirtualPod], rng: Random) -> None:
        super().__init__(pods, rng)
        self._ranks: dict[int, list[VirtualPod]] = {}
        for pod in pods:
            self._ranks.setdefault(pod.pod, []).append(pod)
        self._balancers = {pod: InternalBalancer(partial(_queues, ranks)) for pod, ranks in self._ranks.items()}

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        ready = sorted({self.pods[at].pod for at in candidates})
        pod = min(
            ready, key=lambda pod: (sum(self.in_flight[rank.index] for rank in self._ranks[pod]), self.rng.random())
        )
        return self._ranks[pod][self._balancers[pod].choose(now)].index


def _queues(ranks: Sequence[VirtualPod]) -> list[tuple[int, int]]:
    return [(rank.waiting, len(rank.engine.running)) for rank in ranks]


class PowerOfTwo(SimplePolicy):
    """The less busy of two that are drawn."""

    def choose(self, job: Job, candidates: Sequence[int], now: float) -> int:
        drawn = self.rng.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda pod: self.in_flight[pod])
