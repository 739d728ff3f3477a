"""What the dashboard's events add up to: the pods as they are, and what they did of late. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

WINDOW = 10.0
"""Seconds over which legs are counted."""

BETWEEN_POINTS = 7.0
"""Seconds at most; what is older was not followed by another until somebody looked."""

FRESH = 30.0
"""Seconds for which the latest rates and percentiles may be shown."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one pod, by its own count between two looks at it; None where it did not say, or did nothing."""

    hit_ratio: float | None = None
    ttft_50: float | None = None
    ttft_90: float | None = None
    tokens: float | None = None
    """Answered, per second."""


UNKNOWN = Figures()


@dataclass(frozen=True, slots=True)
class Pod:
    """A row of the dashboard's, and what else is known. `requests` are kvlane's own, the next three the pod's."""

    name: str
    pool: str = ""
    role: str = ""
    state: str = ""
    breaker: str = "closed"
    doubts: tuple[str, ...] = ()
    requests: int = 0
    waiting: int = 0
    running: int = 0
    kv: float = 0.0
    stale: bool = False
    leaving: bool = False
    sent: int = 0
    failed: int = 0
    rate: float | None = None
    """Legs per second, of late; None where they were counted but once."""
    failures: float | None = None
    figures: Figures = UNKNOWN

    @property
    def condition(self) -> str:
        """Its state, or what is wrong with it in spite of that."""
        if self.leaving:
            return "leaving"
        if self.state != "ready":
            return self.state
        if self.breaker != "closed":
            return "probing" if "half" in self.breaker else "broken"
        return "doubted" if self.doubts else "stale" if self.stale else "ready"


_KEPT = frozenset(each.name for each in fields(Pod))


class Picture:
    """Lives as long as the command; what was learnt before a connection broke is shown until there is something new."""

    def __init__(self) -> None:
        self.about: Json = {}
        self.point: Json = {}
        """Of the whole proxy, between its two latest looks."""
        self.pods: dict[str, Pod] = {}
        self.figures: dict[str, Figures] = {}
        self.waits = 0
        """Requests that kvlane holds back."""
        self._fields: list[str] = []
        self._seen: deque[tuple[float, dict[str, tuple[int, int]]]] = deque()
        self._point_at = 0.0
        self._counts = False

    def take(self, event: str, body: Json, now: float) -> None:
        """Of an event `all` or `change`, at a moment of monotonic time."""
        if event == "all":
            self._fields, self.pods = body["fields"], {}
            self._seen.clear()
        for name, row in body.get("pods", {}).items():
            if row is None:
                self.pods.pop(name, None)
            else:
                self.pods[name] = self._pod(name, row)
        self.about = body.get("about") or self.about
        if "queues" in body:
            self.waits = sum(band["waiting"] for pool in body["queues"] or () for band in pool["bands"])
        self._take_point(body, now)
        self._counts = any(pod.sent for pod in self.pods.values())
        self._count(body)

    def rows(self) -> list[Pod]:
        then, before = self._seen[0] if self._seen else (0.0, {})
        seconds = self._seen[-1][0] - then if self._seen else 0.0
        return [self._known(pod, before.get(pod.name), seconds) for pod in self.pods.values()]

    def totals(self, now: float) -> Json:
        """The latest point, unless it is old."""
        return self.point if now - self._point_at < FRESH else {}

    def _pod(self, name: str, row: list[Any]) -> Pod:
        given = {key: value for key, value in zip(self._fields, row, strict=True) if key in _KEPT}
        return Pod(name, **{**given, "doubts": tuple(given.get("doubts", ()))})

    def _take_point(self, body: Json, now: float) -> None:
        if points := _points(body):
            age = max(0.0, body.get("at", 0.0) - points[-1].get("t", 0.0))
            self.point, self._point_at = points[-1], now - age

    def _count(self, body: Json) -> None:
        at = self._counted_at(body)
        if at is not None:
            self._seen.append((at, {name: (pod.sent, pod.failed) for name, pod in self.pods.items()}))
            while len(self._seen) > 2 and at - self._seen[1][0] >= WINDOW:
                self._seen.popleft()

    def _counted_at(self, body: Json) -> float | None:
        """By the clock of the proxy. Several workers are asked for their counts no more often than for points."""
        if self.about.get("workers", 1) > 1:
            points = _points(body)
            if points and body["at"] - points[-1]["t"] < BETWEEN_POINTS:
                return float(points[-1]["t"])
            if "points" not in body:
                return None
        return float(body["at"])

    def _known(self, pod: Pod, before: tuple[int, int] | None, seconds: float) -> Pod:
        figures = self.figures.get(pod.name, UNKNOWN)
        if before is None or seconds <= 0 or not self._counts:
            return replace(pod, figures=figures)
        sent, failed = max(0, pod.sent - before[0]), max(0, pod.failed - before[1])
        return replace(pod, figures=figures, rate=sent / seconds, failures=failed / seconds)


def _points(body: Json) -> Sequence[Json]:
    return body.get("points") or ([body["point"]] if "point" in body else [])
