"""What a decision is made of: how many replicas each role has, what they report, and how old that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.autoscale.readings import reading


@dataclass(frozen=True, slots=True)
class Sample:
    """`value` is a number, or for metrics that are averaged one per ready replica; `at` is monotonic seconds."""

    value: Any
    at: float


@dataclass(frozen=True, slots=True)
class Observed:
    """One role. `current` are the replicas that are asked for, `ready` those that serve, `draining` those that will not
    for long. Scaling metrics and pressure signals are apart: neither is ever used as the other."""

    current: int
    ready: int
    draining: int = 0
    metrics: Mapping[str, Sample] = field(default_factory=dict)
    signals: Mapping[str, Sample] = field(default_factory=dict)

    def fresh(self, now: float, age: float) -> Situation:
        """What is older than `age` seconds is missing."""
        metrics = {
            name: _usable(sample.value) if now - sample.at <= age else None for name, sample in self.metrics.items()
        }
        signals = {
            name: value
            for name, sample in self.signals.items()
            if now - sample.at <= age and (value := reading(sample.value)) is not None
        }
        return Situation(self.current, self.ready, self.draining, metrics, signals)


@dataclass(frozen=True, slots=True)
class Situation:
    """One role at the moment of a decision, without what is stale: a metric that the role has and that is missing is
    None, a signal that is missing is not there."""

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


def _usable(value: Any) -> Any:
    return [reading(one) for one in value] if isinstance(value, list | tuple) else reading(value)


class Source(Protocol):
    """Where the loop looks."""

    async def observe(self) -> Mapping[str, Observed]:
        """By role. A role of which not even the replicas are known is not there."""
