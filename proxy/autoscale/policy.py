"""The input and output of the recommender: roles, coordination, observations and the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from proxy.core.params import param

QUEUE_DEPTH, KV_USAGE, TTFT = "queue_depth", "kv_cache_utilization", "ttft"
PREFILL_LOAD = "prefill_load"
SATURATION: Mapping[str, float] = {QUEUE_DEPTH: 32.0, KV_USAGE: 1.0, TTFT: 2.0}
"""Signals that every role may have, in the order in which they are summed, and the value at which each is saturated:
requests waiting at a replica, share of its KV cache, seconds."""

ANY_ROLE = "*"
SIGNAL_WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "prefill": {QUEUE_DEPTH: 0.5, TTFT: 0.5},
    "decode": {QUEUE_DEPTH: 0.5, KV_USAGE: 0.5},
    ANY_ROLE: {QUEUE_DEPTH: 1 / 3, KV_USAGE: 1 / 3, TTFT: 1 / 3},
}

EXPANSION = 200.0
"""Size of each package of a role relative to the one before, in percent."""

Mode = Literal["off", "preferred", False]
"""Scaling mode. YAML reads `off` as False."""


Baseline = Literal["cost", "current", "weights", "demand"]


class Cause(Enum):
    """Reasons why a result differs from the demand of roles and pressure, in the order in which a result lists them."""

    PANIC = "PanicMode"
    UNAVAILABLE = "PressureUnavailable"
    PARTIAL = "PressurePartial"
    IDLE = "Idle"
    BAND_IGNORED = "BandIgnored"
    INFEASIBLE = "Infeasible"
    CLAMPED = "Clamped"
    ROUNDING = "Rounding"
    HYSTERESIS = "Hysteresis"


@dataclass(frozen=True, slots=True)
class Role:
    """One role. `current` are requested replicas, `ready` serving ones, `demand` the number that the metrics require;
    None if unknown."""

    name: str
    min: int = param(at_least=0)
    max: int = param(at_least=1)
    cost: float = param(1.0, at_least=0)
    weight: float = param(1.0, at_least=0)
    current: int | None = param(None, at_least=0)
    ready: int | None = param(None, at_least=0)
    demand: float | None = param(None, at_least=0)


@dataclass(frozen=True, slots=True)
class Signal:
    """An additional pressure signal of one role. It does not change the total."""

    source: str = param(doc="where the value comes from: a scraped metric, or promql: and a query")
    saturation: float = param(doc="value that counts as full pressure", more_than=0)
    weight: float = param(1.0, "weight among the signals of the role", at_least=0)


@dataclass(frozen=True, slots=True)
class Coordination:
    """The rules for the distribution of a total over roles. `preferred_ratio` is kept as written, because a wrong band
    is ignored and reported: `read_bands`."""

    mode: Mode = param("off", "off: divide by cost alone; preferred: divide by pressure, within the preferred ratios")
    preferred_ratio: Mapping[str, Any] = param(
        {}, "role -> {min, max}: percentage of the total that the role should have"
    )
    alpha: float = param(0.5, at_least=0, at_most=1)
    baseline: Baseline = param("cost")
    normalization: Literal["absolute", "relative"] = param(
        "absolute", "absolute: pressure relative to saturation; relative: pressure relative to the other roles"
    )
    weight_by: Literal["none", "ready"] = param(
        "none", "ready: the pressure of a role counts once for each of its ready replicas"
    )
    combine: Literal["mean", "max"] = param("mean", "how the signals of a role are combined: weighted mean or maximum")
    pressure_floor: float = param(0.05, "pressure up to which all roles count as idle", at_least=0, at_most=1)
    hysteresis_percent: float = param(0.0, at_least=0, at_most=20)
    panic_hold: bool = param(True, "in panic mode, add replicas to the running ones and move none between roles")
    coupled: bool = param(False)
    saturation: Mapping[str, float] = param({}, "signal -> value that counts as full pressure")
    signal_weights: Mapping[str, Mapping[str, float]] = param({}, "role or * -> signal -> weight")
    signals: Mapping[str, Mapping[str, Signal]] = param({}, "role -> name -> a further signal")

    def looked_at(self, role: str) -> list[tuple[str, float, float]]:
        """Return name, weight and saturation of each signal that counts for the role, in the order of the sum."""
        weights = self._weights(role)
        known = [
            (name, weights.get(name, 0.0), self.saturation.get(name, saturation))
            for name, saturation in SATURATION.items()
        ]
        own = self.signals.get(role, {})
        known += [(name, one.weight, one.saturation) for name, one in own.items() if name not in SATURATION]
        return [one for one in known if one[1] > 0]

    def _weights(self, role: str) -> Mapping[str, float]:
        for given in (self.signal_weights, SIGNAL_WEIGHTS):
            if role in given:
                return given[role]
        return self.signal_weights.get(ANY_ROLE, SIGNAL_WEIGHTS[ANY_ROLE])


@dataclass(frozen=True, slots=True)
class Result:
    """A distribution. `total` is the requested total within the bounds of the roles. Shares and `target` (fractional
    replicas) are by role, and empty where they were not computed; `band_satisfied` is then None."""

    replicas: Mapping[str, int]
    total: int
    applied: Literal["off", "panic", "preferred"]
    reasons: tuple[Cause, ...] = ()
    band_satisfied: bool | None = None
    baseline_share: Mapping[str, float] = field(default_factory=dict)
    pressure: Mapping[str, float | None] = field(default_factory=dict)
    pressure_share: Mapping[str, float] = field(default_factory=dict)
    blended_share: Mapping[str, float] = field(default_factory=dict)
    target: Mapping[str, float] = field(default_factory=dict)

    @property
    def realized_share(self) -> dict[str, float]:
        return {name: count / self.total if self.total else 0.0 for name, count in self.replicas.items()}

    @property
    def shares(self) -> dict[str, Mapping[str, float]]:
        return {
            "baseline": self.baseline_share,
            "pressure": self.pressure_share,
            "blended": self.blended_share,
            "realized": self.realized_share,
        }


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def reading(value: Any) -> float | None:
    """Return the reading; None is missing, and 0 is a valid reading."""
    found = number(value)
    return None if found is None or found < 0 else found


def readings(value: Any) -> Any:
    """Return the reading, or the one of each replica."""
    return [reading(one) for one in value] if isinstance(value, list | tuple) else reading(value)


def mapped(written: Any) -> Mapping[Any, Any]:
    return written if isinstance(written, Mapping) else {}


def of_role(metrics: Any, role: str) -> Mapping[Any, Any]:
    """Return the values of a role in {role: {signal: value}}."""
    return mapped(mapped(metrics).get(role))


@dataclass(frozen=True, slots=True)
class RoleSituation:
    """One role at the moment of a decision. `current` are requested replicas, `ready` serving ones, `draining` replicas
    that will stop. A metric is a number, or one per ready replica; a missing metric is None, a missing signal absent.
    Metrics and signals are never used in place of each other."""

    current: int
    ready: int
    draining: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    signals: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_starting(self) -> bool:
        return self.ready + self.draining < self.current

    @property
    def is_moving(self) -> bool:
        return self.ready != self.current or self.draining > 0
