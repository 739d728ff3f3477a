"""The router before the fleet, the same for all scalers: each attempt to the least busy replica of its role."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bench.scaling.fleet import DECODE, PREFILL, Fleet, Replica, State
from proxy.core.attempt import Stage
from proxy.lab.simulation import Policy
from proxy.lab.workload import Job


@dataclass(slots=True)
class _Route:
    job: Job
    arrived: float
    prefill: Replica
    decode: Replica | None = None
    fetched: bool = False


class LeastWork(Policy):
    """Waiting prompt tokens count on prefill pods, tokens of prompt and response on decode pods."""

    scrapes = 0.0

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._routes: dict[int, _Route] = {}
        self.requested = 0
        """Prompt tokens of all requests so far."""
        self._prefills: deque[tuple[float, float]] = deque()

    def place(self, index: int, job: Job, now: float) -> int:
        pod = self._least(PREFILL)
        self._routes[index] = _Route(job, now, pod)
        _assign(pod, job.prompt_tokens)
        self.requested += job.prompt_tokens
        return pod.pod

    def stage(self, index: int) -> Stage:
        return Stage.PREFILL if self._routes[index].decode is None else Stage.DECODE

    def prefilled(self, index: int, now: float, cached_tokens: int) -> int:
        route = self._routes[index]
        route.prefill.tokens -= route.job.prompt_tokens
        self._prefills.append((now, now - route.arrived))
        route.decode = self._least(DECODE)
        _assign(route.decode, _whole(route.job))
        return route.decode.pod

    def first_byte(self, index: int, now: float) -> None:
        """The prompt has been fetched; it may have been so for a moment."""
        route = self._routes[index]
        if not route.fetched:
            route.fetched = True
            route.prefill.busy -= 1

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        route = self._routes.pop(index)
        if route.decode is not None:
            route.decode.tokens -= _whole(route.job)
            route.decode.busy -= 1

    def since(self, start: float) -> list[float]:
        """Seconds from arrival to the end of prefill, for prefills that ended after this moment."""
        while self._prefills and self._prefills[0][0] < start:
            self._prefills.popleft()
        return [seconds for _, seconds in self._prefills]

    def _least(self, role: str) -> Replica:
        return min(self._fleet.of(role, State.SERVING), key=lambda one: one.tokens)


def _assign(pod: Replica, tokens: int) -> None:
    pod.busy += 1
    pod.tokens += tokens


def _whole(job: Job) -> int:
    return job.prompt_tokens + job.output_tokens
