"""Damping of a total: limits per period, stabilization windows and panic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from proxy.core.params import Duration, param

_LONGEST = 1800.0


@dataclass(frozen=True, slots=True)
class ScaleUp:
    instances: int = param(4, "replicas that may be added per period", at_least=0)
    percent: int = param(
        100, "percentage of the replicas at the start of the period that may be added", at_least=0, at_most=1000
    )
    period: Duration = param(Duration(60.0), "period of both limits; 0: no limit", at_most=_LONGEST)
    select: Literal["or", "and", "none"] = param(
        "or", "which of the two limits applies: the larger, the smaller, or neither"
    )
    stabilization: Duration = param(
        Duration(0.0), "time for which more replicas must have been recommended before any is added", at_most=_LONGEST
    )


@dataclass(frozen=True, slots=True)
class ScaleDown:
    instances: int = param(1, "replicas that may be removed per period", at_least=0)
    percent: int = param(
        50, "percentage of the replicas at the start of the period that may be removed", at_least=0, at_most=1000
    )
    period: Duration = param(Duration(60.0), "period of both limits; 0: no limit", at_most=_LONGEST)
    select: Literal["or", "and", "none"] = param(
        "or", "which of the two limits applies: the larger, the smaller, or neither"
    )
    stabilization: Duration = param(
        Duration(240.0),
        "time for which fewer replicas must have been recommended before one is removed",
        at_most=_LONGEST,
    )
    spare: float = param(0.0, "spare capacity, in replicas, that must remain after a removal", at_least=0, at_most=2)


@dataclass(frozen=True, slots=True)
class Panic:
    """Panic mode: replicas are added quickly, none is removed, and pressure moves none between roles."""

    threshold_percent: int = param(
        200, "recommended percentage of the current total that starts panic mode", at_least=110, at_most=1000
    )
    hold: Duration = param(
        Duration(60.0),
        "time that panic mode lasts after the last such recommendation; 0: no panic mode",
        at_most=_LONGEST,
    )
    percent: int = param(
        1000, "percentage of the replicas at the start of the period that may be added", at_least=0, at_most=1000
    )
    period: Duration = param(Duration(60.0), "period of this limit; 0: no limit", at_most=_LONGEST)


@dataclass(frozen=True, slots=True)
class Behavior:
    scale_up: ScaleUp = field(default_factory=ScaleUp)
    scale_down: ScaleDown = field(default_factory=ScaleDown)
    panic: Panic = field(default_factory=Panic)


@dataclass(frozen=True, slots=True)
class WindowExtremes:
    """Extremes over the windows of a behavior. The extremes of applied totals include the current one; the extremes of
    recommendations are None if the window is disabled or empty."""

    highest_recommended: int | None
    lowest_recommended: int | None
    highest_applied: int
    lowest_applied: int
    lowest_in_panic: int


def corrected(behavior: Behavior, past: WindowExtremes, current: int, recommended: int, *, panic: bool) -> int:
    """Return the damped total. In panic it is never less than the current one. A limit with period 0 does not apply."""
    if panic:
        return _grown_in_panic(behavior.panic, past, current, recommended)
    if recommended < current:
        return _shrunk(behavior.scale_down, past, current, recommended)
    if recommended > current:
        return _grown(behavior.scale_up, past, current, recommended)
    return current


def _grown_in_panic(panic: Panic, past: WindowExtremes, current: int, recommended: int) -> int:
    """Return the total in panic. From 0 replicas the percentage does not apply, because it would never add one."""
    most, start = recommended, past.lowest_in_panic
    if start > 0 and panic.period > 0:
        most = min(most, start + start * panic.percent // 100)
    return max(most, current)


def _shrunk(down: ScaleDown, past: WindowExtremes, current: int, recommended: int) -> int:
    least, start = recommended, past.highest_applied
    if past.highest_recommended is not None:
        least = max(least, past.highest_recommended)
    by_count, by_part = start - down.instances, start - start * down.percent // 100
    if down.select != "none" and down.period > 0:
        least = max(least, min(by_count, by_part) if down.select == "or" else max(by_count, by_part))
    return min(least, current)


def _grown(up: ScaleUp, past: WindowExtremes, current: int, recommended: int) -> int:
    most, start = recommended, past.lowest_applied
    if past.lowest_recommended is not None:
        most = min(most, past.lowest_recommended)
    by_count, by_part = start + up.instances, start + start * up.percent // 100
    if up.select != "none" and up.period > 0:
        most = min(most, max(by_count, by_part) if up.select == "or" else min(by_count, by_part))
    return max(most, current)


class Damping:
    """A behavior and its windows. The windows contain recommendations before damping and totals after it: a window of
    damped recommendations would hold a damped value forever."""

    def __init__(self, behavior: Behavior) -> None:
        self._highest_recommended, self._lowest_recommended = Records(max), Records(min)
        self._highest_applied, self._lowest_applied, self._lowest_in_panic = (
            StepSeries(max),
            StepSeries(min),
            StepSeries(min),
        )
        self._panic_ends: float | None = None
        self.behavior = behavior

    @property
    def behavior(self) -> Behavior:
        """The limits. When they change, past recommendations and totals still count, within the new windows."""
        return self._behavior

    @behavior.setter
    def behavior(self, behavior: Behavior) -> None:
        self._behavior = behavior
        up, down, panic = behavior.scale_up, behavior.scale_down, behavior.panic
        self._highest_recommended.length = down.stabilization
        self._lowest_recommended.length = up.stabilization
        self._highest_applied.length = down.period
        self._lowest_applied.length = up.period
        self._lowest_in_panic.length = panic.period

    def start(self, now: float, current: int) -> None:
        """Fill the windows as if the current total had been recommended until now, so that the windows apply from the
        start. Called at the start, and after a gap that is longer than the windows."""
        self._recommended(now, current)
        self.applied(now, current)

    def correct(self, now: float, current: int, recommended: int) -> tuple[int, bool]:
        """Return the damped total, and whether panic mode is on."""
        panic = self._is_panic(now, current, recommended)
        self._recommended(now, recommended)
        past = WindowExtremes(
            self._highest_recommended.find(now),
            self._lowest_recommended.find(now),
            self._highest_applied.find(now, current),
            self._lowest_applied.find(now, current),
            self._lowest_in_panic.find(now, current),
        )
        return corrected(self._behavior, past, current, recommended, panic=panic), panic

    def applied(self, now: float, total: int) -> None:
        """Record the total that was applied, after bounds, budgets and operators."""
        for line in (self._highest_applied, self._lowest_applied, self._lowest_in_panic):
            line.append(now, total)

    def _recommended(self, now: float, total: int) -> None:
        self._highest_recommended.append(now, total)
        self._lowest_recommended.append(now, total)

    def _is_panic(self, now: float, current: int, recommended: int) -> bool:
        panic = self._behavior.panic
        if panic.hold <= 0:
            return False
        if recommended > current and recommended * 100 >= current * panic.threshold_percent:
            self._panic_ends = now + panic.hold
        return self._panic_ends is not None and now <= self._panic_ends


Best = Callable[[Iterable[int]], int]
"""`max` or `min`."""


class _Window:
    """Values of the last `length` seconds; a window of length 0 is always empty."""

    def __init__(self, best: Best, length: float = 0.0) -> None:
        self._best = best
        self.length = length
        self._values: deque[tuple[float, int]] = deque()

    def append(self, now: float, value: int) -> None:
        self._values.append((now, value))
        if self.length <= 0:
            self._values.clear()


class Records(_Window):
    """A window in which a value counts from its moment until `length` seconds later."""

    def find(self, now: float) -> int | None:
        while self._values and (self.length <= 0 or self._values[0][0] + self.length < now):
            self._values.popleft()
        return self._best(value for _, value in self._values) if self._values else None


class StepSeries(_Window):
    """A window in which a value holds until the next one is appended, and counts until `length` seconds after that; the
    last one counts for twice the length."""

    def find(self, now: float, current: int) -> int:
        """Return the extreme; `current` is always included."""
        while len(self._values) > 1 and self._values[1][0] + self.length < now:
            self._values.popleft()
        if self.length <= 0 or (len(self._values) == 1 and self._values[0][0] + 2 * self.length < now):
            self._values.clear()
        return self._best([*(value for _, value in self._values), current])
