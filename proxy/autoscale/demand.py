"""Demand: the number of replicas that metrics require, now and by the time new pods serve, before damping."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from proxy.autoscale.policy import Role, reading
from proxy.core.params import param

MOST = 10**9
"""Largest number of replicas that a metric can require, however far it is from its target."""

Kind = Literal["avg", "value", "total"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A scaling metric of a role or a pool. Its kind must be given, because a name does not show whether the value is
    an average or a sum."""

    name: str = param(doc="name of the metric")
    kind: Kind = param(
        doc="avg: a value per replica; value: one level for all replicas; total: a sum over all replicas"
    )
    target: float = param(doc="target of the value per replica, of the level, or of the sum per replica", more_than=0)
    source: str = param(
        "", "where the value comes from: a scraped metric, or promql: and a query; default: the metric of this name"
    )


@dataclass(frozen=True, slots=True)
class SizedRole:
    """One role with its scaling metrics by name: a number, or one per ready replica. None, NaN and negative values are
    missing."""

    role: Role
    metrics: Mapping[str, Any]

    @property
    def current(self) -> int:
        return self.role.current or 0

    @property
    def ready(self) -> int:
        return self.current if self.role.ready is None else self.role.ready


def desired(
    metric: Metric, value: Any, current: int, tolerance: float, ready: int | None = None, spare: float = 0.0
) -> int | None:
    """Return the number of replicas at which the metric is at its target; `current` if it is within `tolerance` (0.1 is
    10 %) of that; None if it is missing. When scaling up, replicas that are not ready count as idle; when scaling down
    they do not count. The same holds for ready replicas without a value, except that they count as at the target when
    scaling down. This is the rule of the Kubernetes HPA. When scaling down, the remaining replicas must have `spare` of
    a replica in reserve, unless all may be removed: otherwise a value near a whole number would oscillate."""
    if isinstance(value, list | tuple):
        values = [reading(one) for one in value]
    elif (level := reading(value)) is None:
        return None
    elif metric.kind == "total":
        values = [level]
    elif (count := current if ready is None else min(ready, current)) == 0:
        return current or _whole(_ratio(level, metric.target))
    else:
        values = [level] * count
    found = _desired(metric, values, current, tolerance)
    if not spare or not found or found >= current:
        return found
    more = spare * metric.target / len(values)
    careful = _desired(metric, [None if one is None else one + more for one in values], current, tolerance)
    return found if careful is None else min(careful, current)


def desired_of_role(sized: SizedRole, metrics: Sequence[Metric], tolerance: float, spare: float = 0.0) -> int | None:
    """Return the largest number that one of the metrics requires, within the role's bounds. While a metric is missing
    the role does not shrink; None if all are missing. A role with equal bounds needs no metrics."""
    role = sized.role
    if role.min == role.max:
        return role.min
    values = [(one, sized.metrics.get(one.name)) for one in metrics]
    wanted = [desired(one, value, sized.current, tolerance, role.ready, spare) for one, value in values]
    return recommended(role.min, role.max, sized.current, wanted)


def recommended(low: int, high: int, current: int, wanted: Sequence[int | None]) -> int | None:
    """Return the largest number of replicas that metrics require; None stands for a missing metric. A current number
    out of bounds is moved to the nearest bound."""
    if not low <= current <= high:
        return min(max(current, low), high)
    known = [one for one in wanted if one is not None]
    if not known:
        return None
    most = max(known) if len(known) == len(wanted) else max(*known, current)
    return min(max(most, low), high)


def demands(
    fleet: Sequence[SizedRole], metrics: Mapping[str, Sequence[Metric]], tolerance: float, spare: float = 0.0
) -> list[int] | None:
    """Return the number that each role requires by its own metrics; the current number for a role without observation.
    None if no role is observable."""
    wanted = [desired_of_role(one, metrics.get(one.role.name, ()), tolerance, spare) for one in fleet]
    fixed = [one.role.min == one.role.max for one in fleet]
    if all(count is None or is_fixed for count, is_fixed in zip(wanted, fixed, strict=True)) and not all(fixed):
        return None
    return [one.current if count is None else count for one, count in zip(fleet, wanted, strict=True)]


def total_of_all(
    fleet: Sequence[SizedRole], metrics: Sequence[Metric], tolerance: float, spare: float = 0.0
) -> int | None:
    """Return the total of all roles by common metrics, as if they were one role. A role without a metric is left out
    for that metric; while a role misses a value of a metric that it has, the total does not shrink. None if all are
    missing."""
    low, high = sum(one.role.min for one in fleet), sum(one.role.max for one in fleet)
    current, ready = sum(one.current for one in fleet), sum(one.ready for one in fleet)
    wanted: list[int | None] = []
    for metric in metrics:
        found = [(one.metrics[metric.name], one.ready) for one in fleet if metric.name in one.metrics]
        wanted.append(desired(metric, joined(metric.kind, found), current, tolerance, ready, spare))
        if any(_is_missing(value) for value, _ in found):
            wanted.append(None)
    return recommended(low, high, current, wanted)


def joined(kind: Kind, values: Sequence[tuple[Any, int]]) -> Any:
    """Join the values of several roles and their numbers of replicas: sums are added, levels are averaged over
    replicas, and values per replica are concatenated."""
    if any(isinstance(value, list | tuple) for value, _ in values):
        return [
            one for value, count in values for one in (value if isinstance(value, list | tuple) else [value] * count)
        ]
    known = [(found, count) for value, count in values if (found := reading(value)) is not None]
    if not known:
        return None
    if kind == "total":
        return math.fsum(value for value, _ in known)
    replicas = sum(count for _, count in known)
    if not replicas:
        return math.fsum(value for value, _ in known) / len(known)
    return math.fsum(value * count for value, count in known) / replicas


def _is_missing(value: Any) -> bool:
    return not isinstance(value, list | tuple) and reading(value) is None


def _desired(metric: Metric, values: Sequence[float | None], current: int, tolerance: float) -> int | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if metric.kind == "total":
        return _of_sum(_ratio(math.fsum(known) * len(values) / len(known), metric.target), current, tolerance)
    return _of_levels(known, len(values) - len(known), metric.target, current, tolerance)


def _of_sum(count: float, current: int, tolerance: float) -> int:
    if current and abs(count / current - 1) <= tolerance + _SLACK:
        return current
    return _whole(count)


def _of_levels(known: Sequence[float], silent: int, target: float, current: int, tolerance: float) -> int:
    """`known` are the values of ready replicas; `silent` more are ready without a value."""
    count, whole, unready = len(known), math.fsum(known), max(current - len(known) - silent, 0)
    ratio = _ratio(whole / count, target)
    up = ratio >= 1
    if not silent and not (up and unready):
        return current if abs(ratio - 1) <= tolerance + _SLACK else _whole(ratio * count)
    count += silent + (unready if up else 0)
    whole += 0 if up else silent * target
    careful = _ratio(whole / count, target)
    if abs(careful - 1) <= tolerance + _SLACK or (careful >= 1) != up:
        return current
    found = _whole(careful * count)
    return current if (found < current if up else found > current) else found


_SLACK = 1e-9


def _ratio(value: float, target: float) -> float:
    if target > 0:
        return value / target
    return math.inf if value > 0 else 0.0


def _whole(count: float) -> int:
    """Round up, but ignore floating-point errors: 2.1 / 0.3 is 7."""
    if count >= MOST:
        return MOST
    return math.ceil(count - _SLACK * max(count, 1.0))


TREND_WINDOW = 240.0
"""Seconds of readings for a trend."""

FEWEST = 5
"""Smallest number of readings for a trend."""

Point = tuple[float, float]


@dataclass(slots=True)
class DemandForecast:
    """Forecasts of the metrics of a pool. Lives as long as the pool's past. Only sums over the fleet are forecast: a
    level depends on the number of replicas and has no trend of its own."""

    _past: dict[tuple[str, str], deque[Point]] = field(default_factory=dict)
    """Readings by role and metric while the ready replicas had enough capacity. Beyond that, a metric grows with the
    waiting requests, which show how many replicas are missing now and not how many will be."""
    _confidence: dict[tuple[str, str], ForecastConfidence] = field(default_factory=dict)

    def ahead(self, now: float, one: SizedRole, metrics: Sequence[Metric], seconds: float) -> SizedRole:
        """Return the role as forecast this many seconds ahead: growth continues, weighted by the reliability of recent
        forecasts. Falling values are not extrapolated."""
        if seconds <= 0:
            return one
        grown = {metric.name: self._grown(now, one, metric, seconds) for metric in metrics if metric.kind == "total"}
        return replace(one, metrics={**one.metrics, **grown})

    def _grown(self, now: float, one: SizedRole, metric: Metric, seconds: float) -> Any:
        value = one.metrics.get(metric.name)
        whole = _sum_of(value)
        if whole is None:
            return value
        past = self._past.setdefault((one.role.name, metric.name), deque())
        while past and past[0][0] < now - TREND_WINDOW:
            past.popleft()
        served = whole <= one.ready * metric.target
        if served:
            past.append((now, whole))
        growth = 0.0
        if past:
            since, last = past[-1]
            growth = max(last + trend(past) * (now + seconds - since) - whole, 0.0)
        confidence = self._confidence.setdefault((one.role.name, metric.name), ForecastConfidence())
        confidence.judge(now, whole if served else None)
        confidence.say(now + seconds, whole, growth)
        will = whole + confidence.share(metric.target) * growth
        if not isinstance(value, list | tuple):
            return will
        return [one * will / whole for one in value] if whole > 0 else value


def trend(points: Sequence[Point]) -> float:
    """Return the growth per second: the slope of the least-squares line, less its standard error, so that noise has no
    trend. Never less than 0."""
    if len(points) < FEWEST:
        return 0.0
    mean_time = math.fsum(at for at, _ in points) / len(points)
    mean = math.fsum(value for _, value in points) / len(points)
    spread = math.fsum((at - mean_time) ** 2 for at, _ in points)
    slope = math.fsum((at - mean_time) * (value - mean) for at, value in points) / spread
    missed = math.fsum((value - mean - slope * (at - mean_time)) ** 2 for at, value in points)
    return max(slope - math.sqrt(missed / (len(points) - 2) / spread), 0.0)


def _sum_of(value: Any) -> float | None:
    """Return the sum; None if a part is missing."""
    if not isinstance(value, list | tuple):
        return reading(value)
    known = [reading(one) for one in value]
    return None if None in known else math.fsum(one for one in known if one is not None)


MEMORY = 1200.0
"""Seconds after which the weight of a forecast has fallen to 1/e."""

BENEFIT = 4.0
"""Number of forecasts, of one replica's worth each, that count as correct before any forecast was settled."""

MOST_GROWTH = 1.5
"""Largest growth that counts, as a multiple of the forecast: otherwise one burst would compensate for all wrong
forecasts."""


@dataclass(slots=True)
class ForecastConfidence:
    """Reliability of the forecasts of one sum: the slope of growth over forecast growth, with the largest weight on the
    latest."""

    _open: deque[tuple[float, float, float]] = field(default_factory=deque)
    """Time, value and growth of each forecast."""
    _came: float = 0.0
    _forecast: float = 0.0
    _seen: float = 0.0

    def share(self, unit: float) -> float:
        """Return the share of the forecast growth to rely on, in [0, 1]. `unit` is one replica's worth."""
        benefit = BENEFIT * unit * unit
        whole = self._forecast + benefit
        return min(max((self._came + benefit) / whole, 0.0), 1.0) if whole > 0 else 1.0

    def say(self, due: float, value: float, growth: float) -> None:
        """Record a forecast: the sum is `value` and will grow by this amount."""
        if growth > 0:
            self._open.append((due, value, growth))

    def judge(self, now: float, value: float | None) -> None:
        """Compare due forecasts with the value. If the value is None (unknown), drop these forecasts."""
        kept = math.exp((self._seen - now) / MEMORY)
        self._came, self._forecast, self._seen = self._came * kept, self._forecast * kept, now
        while self._open and self._open[0][0] <= now:
            _, before, growth = self._open.popleft()
            if value is not None:
                came = min(max(value - before, -growth), MOST_GROWTH * growth)
                self._came += came * growth
                self._forecast += growth**2
