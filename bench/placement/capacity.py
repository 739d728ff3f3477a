"""What a fleet can do at most: load 1.0."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from bench.placement.pods import VirtualPod
from proxy.lab.workload import Job

MIDDLE = (0.2, 0.8)
"""The share of requests whose ends are counted: before, caches are cold; after, pods run out of work."""


def capacity(jobs: Sequence[Job], pods: Sequence[VirtualPod]) -> float:
    """Requests per second of a fleet that always has work, in perfect balance. The pods are new, and used up.

    All requests stand in one queue, in order, and a pod takes the next one whenever its own queue is empty. So no pod
    idles and none is behind another, and prefixes are found as chance has it. A router that finds more of them may
    carry loads above 1.
    """
    ends = _drain(deque(jobs), pods)
    first, last = (ends[int(share * (len(ends) - 1))] for share in MIDDLE)
    return (MIDDLE[1] - MIDDLE[0]) * len(ends) / (last - first)


def _drain(queue: deque[Job], pods: Sequence[VirtualPod]) -> list[float]:
    """When requests ended, in order."""
    ends: list[float] = []
    together: dict[int, list[VirtualPod]] = {}
    for pod in pods:
        together.setdefault(id(pod.stepper), []).append(pod)
    steppers = list(together.values())
    due = [(0.0, at) for at in range(len(steppers))]
    taken = 0
    while due:
        now, at = heappop(due)
        stepper, ranks = steppers[at][0].stepper, steppers[at]
        if any(rank.engine.busy for rank in ranks):
            ends += [now for event in stepper.finish() if event.last]
        for rank in ranks:
            while queue and not rank.is_sated:
                rank.submit(taken, queue.popleft(), now)
                taken += 1
        if any(rank.engine.busy for rank in ranks):
            heappush(due, (stepper.until, at))
    return ends
