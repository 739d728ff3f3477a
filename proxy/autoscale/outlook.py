"""What roles will be asked for by the time that pods serve which start now: metrics, carried on along their trend."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.autoscale.readings import reading
from proxy.autoscale.total import Metric, Sized
from proxy.autoscale.trust import Trust

WINDOW = 240.0
"""Seconds that a trend is drawn through."""

FEWEST = 5
"""Readings that it takes."""

Point = tuple[float, float]


@dataclass(slots=True)
class Outlook:
    """Lives as long as the pool's past. Only sums over the fleet are carried on: a level rises and falls with the
    replicas that are there, and has no trend of its own."""

    _past: dict[tuple[str, str], deque[Point]] = field(default_factory=dict)
    """By role and metric, while the replicas that were ready had enough room for it: beyond that it grows by what
    waits for them, which says how many are missing now and not how many will be."""
    _trust: dict[tuple[str, str], Trust] = field(default_factory=dict)

    def ahead(self, now: float, one: Sized, metrics: Sequence[Metric], seconds: float) -> Sized:
        """The role in so many seconds, if what grew while it was served goes on growing, as far as that has been so
        of late; what falls is taken as it is."""
        if seconds <= 0:
            return one
        grown = {metric.name: self._grown(now, one, metric, seconds) for metric in metrics if metric.kind == "total"}
        return replace(one, metrics={**one.metrics, **grown})

    def _grown(self, now: float, one: Sized, metric: Metric, seconds: float) -> Any:
        value = one.metrics.get(metric.name)
        whole = _whole(value)
        if whole is None:
            return value
        past = self._past.setdefault((one.role.name, metric.name), deque())
        while past and past[0][0] < now - WINDOW:
            past.popleft()
        served = whole <= one.ready * metric.target
        if served:
            past.append((now, whole))
        growth = max(_expected(past, now + seconds) - whole, 0.0) if past else 0.0
        trust = self._trust.setdefault((one.role.name, metric.name), Trust())
        trust.settle(now, whole if served else None)
        trust.say(now + seconds, whole, growth)
        will = whole + trust.share(metric.target) * growth
        if not isinstance(value, list | tuple):
            return will
        return [one * will / whole for one in value] if whole > 0 else value


def _expected(past: Sequence[Point], at: float) -> float:
    since, last = past[-1]
    return last + trend(past) * (at - since)


def trend(points: Sequence[Point]) -> float:
    """Growth per second: the slope of the line with the least squares, less its standard error, so that noise has
    none. Never less than 0."""
    if len(points) < FEWEST:
        return 0.0
    mean_time = math.fsum(at for at, _ in points) / len(points)
    mean = math.fsum(value for _, value in points) / len(points)
    spread = math.fsum((at - mean_time) ** 2 for at, _ in points)
    slope = math.fsum((at - mean_time) * (value - mean) for at, value in points) / spread
    missed = math.fsum((value - mean - slope * (at - mean_time)) ** 2 for at, value in points)
    return max(slope - math.sqrt(missed / (len(points) - 2) / spread), 0.0)


def _whole(value: Any) -> float | None:
    """None where a part of it is missing."""
    if not isinstance(value, list | tuple):
        return reading(value)
    known = [reading(one) for one in value]
    return None if None in known else math.fsum(one for one in known if one is not None)
