"""Damping of a total: limits per period, stabilization windows and panic."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
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
    """Extremes over the windows of a behavior. The extremes of totals in effect include the current one; the extremes
    of recommendations are None if the window is disabled or empty."""

    highest_recommended: int | None
    lowest_recommended: int | None
    highest_in_effect: int
    lowest_in_effect: int
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
    least, start = recommended, past.highest_in_effect
    if past.highest_recommended is not None:
        least = max(least, past.highest_recommended)
    by_count, by_part = start - down.instances, start - start * down.percent // 100
    if down.select != "none" and down.period > 0:
        least = max(least, min(by_count, by_part) if down.select == "or" else max(by_count, by_part))
    return min(least, current)


def _grown(up: ScaleUp, past: WindowExtremes, current: int, recommended: int) -> int:
    most, start = recommended, past.lowest_in_effect
    if past.lowest_recommended is not None:
        most = min(most, past.lowest_recommended)
    by_count, by_part = start + up.instances, start + start * up.percent // 100
    if up.select != "none" and up.period > 0:
        most = min(most, max(by_count, by_part) if up.select == "or" else min(by_count, by_part))
    return max(most, current)


Moments = list[tuple[float, int]]
"""Totals with their times, in order."""


class Damping:
    """The past of a total: recommendations before damping, and totals in effect. A window of damped recommendations
    would hold a damped value forever, and a damped recommendation may never take effect. When the behavior changes, the
    past counts within the new windows."""

    def __init__(self) -> None:
        self._recommended: Moments = []
        self._in_effect: Moments = []
        self._seen = 0.0
        """Time of the latest observation."""
        self._panic_ends = -inf

    def start(self, now: float, current: int) -> None:
        """Fill the windows as if the current total had been recommended until now, so that the windows apply from the
        start. Called at the start, and after a gap that is longer than the windows."""
        _append(self._recommended, now, current)
        _append(self._in_effect, now, current)
        self._seen = now

    def correct(self, behavior: Behavior, now: float, current: int, recommended: int) -> tuple[int, bool]:
        """Return the damped total, and whether panic mode is on. The current total counts as in effect since the
        previous call."""
        up, down, panic = behavior.scale_up, behavior.scale_down, behavior.panic
        if recommended > current and recommended * 100 >= current * panic.threshold_percent:
            self._panic_ends = now + panic.hold
        is_panic = panic.hold > 0 and now <= self._panic_ends
        _append(self._recommended, now, recommended)
        _append(self._in_effect, self._seen, current)
        self._seen = now
        past = WindowExtremes(
            max(recent(self._recommended, now, down.stabilization), default=None),
            min(recent(self._recommended, now, up.stabilization), default=None),
            max([current, *held(self._in_effect, now, down.period)]),
            min([current, *held(self._in_effect, now, up.period)]),
            min([current, *held(self._in_effect, now, panic.period)]),
        )
        return corrected(behavior, past, current, recommended, panic=is_panic), is_panic


def _append(past: Moments, now: float, total: int) -> None:
    past.append((now, total))
    while len(past) > 1 and past[1][0] < now - _LONGEST:
        del past[0]


def recent(past: Moments, now: float, length: float) -> list[int]:
    """Return the values of the last `length` seconds; none if that is 0."""
    return [value for at, value in past if length > 0 and at + length >= now]


def held(past: Moments, now: float, length: float) -> list[int]:
    """Return the values that were in force in the last `length` seconds; none if that is 0. A value is in force until
    the next one, the last one for `length` seconds."""
    ends = [at for at, _ in past[1:]] + [at + length for at, _ in past[-1:]]
    return [value for (_, value), end in zip(past, ends, strict=True) if length > 0 and end + length >= now]
