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
    due = [(0.0, pod.index) for pod in pods]
    taken = 0
    while due:
        now, index = heappop(due)
        engine = pods[index].engine
        if engine.busy:
            ends += [now for event in engine.finish() if event.last]
        while queue and not pods[index].is_sated:
            pods[index].submit(taken, queue.popleft(), now)
            taken += 1
        if engine.busy:
            heappush(due, (engine.until, index))
    return ends
