"""Prompt tokens that the pods of a role took up of late, by their own counters: whoever sent them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from proxy.core.endpoint import Endpoint

WINDOW = 30.0
"""Seconds."""


@dataclass(slots=True)
class Taken:
    """Lives as long as its role is looked at."""

    _looks: deque[tuple[float, Mapping[Endpoint, float]]] = field(default_factory=deque)

    def look(self, now: float, pods: Sequence[Endpoint]) -> float | None:
        """Uncached tokens per second, all pods together, over the last WINDOW seconds or since the first look while
        that is less. A pod counts from its second look on. None: no pod counts them, or this is the first look."""
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - WINDOW:
            looks.popleft()
        ranks = [rank for pod in pods for rank in pod.ranks]
        looks.append((now, {rank: _uncached(rank) for rank in ranks if rank.metrics.prefix_queries > 0}))
        (since, _), (_, last) = looks[0], looks[-1]
        return sum(self._grown(pod) for pod in last) / (now - since) if last and now > since else None

    def _grown(self, pod: Endpoint) -> float:
        """A counter that begins anew has grown from then on only."""
        counted = [look[pod] for _, look in self._looks if pod in look]
        return sum(max(after - before, 0.0) for before, after in pairwise(counted))


def _uncached(pod: Endpoint) -> float:
    """Return the pod's part of the tokens: its ranks are one replica together."""
    return (pod.metrics.prefix_queries - pod.metrics.prefix_hits) / len(pod.ranks)
