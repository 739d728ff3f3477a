"""A load, a fleet and its scaler, on the virtual clock of the replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.scaling.fleet import PREFILL, ROLES, Fleet, State
from bench.scaling.router import LeastWork
from bench.scaling.scalers import Scaler
from proxy.autoscale.policy import RoleSituation
from proxy.core.ports import ManualClock
from proxy.lab.simulation import Simulation
from proxy.lab.workload import Job

SAMPLE, INTERVAL = 1.0, 15.0
"""Seconds between two looks at the pods, and between two decisions, for all scalers."""

METRIC_WINDOW, SIGNAL_WINDOW = 15.0, 30.0
"""Seconds that metrics and signals are the mean of; of times to the first token the p90."""

CLEARED = 60.0
"""Seconds in which waiting prompts are to be computed, in addition to new ones."""


@dataclass(slots=True)
class Moment:
    """The fleet at one second: GPUs held, replicas wanted and serving of each role."""

    at: float
    gpus: int
    wanted: Mapping[str, int]
    serving: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One role at one look: prompt tokens asked so far and those not computed, KV caches in use and in demand, requests
    that wait, replicas."""

    requested: int
    tokens: int
    caches: float
    demanded: float
    waiting: int
    ready: int


@dataclass(slots=True)
class View:
    """What a scaler may know of the fleet: no more than the proxy before it knows."""

    fleet: Fleet
    router: LeastWork
    seen: dict[str, deque[_Seen]] = field(
        default_factory=lambda: {role: deque(maxlen=int(SIGNAL_WINDOW / SAMPLE)) for role in ROLES}
    )

    def sample(self, now: float) -> None:
        for role, past in self.seen.items():
            serving = self.fleet.of(role, State.SERVING)
            readings = [self.fleet.pods[one.pod].read(now) for one in serving]
            past.append(
                _Seen(
                    self.router.requested,
                    sum(one.tokens for one in serving),
                    sum(one.kv_usage for one in readings),
                    sum(one.kv_usage * (1 + one.waiting / max(one.running, 1)) for one in readings),
                    sum(one.waiting for one in readings),
                    len(serving),
                )
            )

    def observe(self, now: float) -> dict[str, RoleSituation]:
        return {role: self._role(role, now) for role in ROLES}

    def _role(self, role: str, now: float) -> RoleSituation:
        past = list(self.seen[role])
        recent, ready = past[-int(METRIC_WINDOW / SAMPLE) :], past[-1].ready
        queue = _mean([one.waiting / max(one.ready, 1) for one in past])
        signals = {
            "queue_depth": queue,
            "kv_cache_utilization": _mean([one.caches / max(one.ready, 1) for one in past]),
        }
        if role == PREFILL:
            rate, (first, last) = self.fleet.shape.prefill_rate, (past[0], past[-1])
            backlog, coming = (
                last.tokens / rate,
                (last.requested - first.requested) / rate / max(len(past) - 1, 1) / SAMPLE,
            )
            metrics = {"prefill_load": coming + backlog / CLEARED}
            times = sorted(self.router.since(now - SIGNAL_WINDOW))
            if times:
                signals["ttft"] = times[int(0.9 * len(times))]
        else:
            metrics = {"kv_cache_demand_sum": _mean([one.demanded for one in recent])}
        return RoleSituation(
            self.fleet.wanted[role],
            ready,
            len(self.fleet.of(role, State.DRAINING)),
            metrics,
            signals,
        )


class Scene(Simulation):
    """`fleet` has begun. `moments` are one for each second of the load; it runs until the last request has ended."""

    def __init__(self, jobs: Sequence[Job], seconds: float, fleet: Fleet, scaler: Scaler, clock: ManualClock) -> None:
        router = LeastWork(fleet)
        self._fleet, self._scaler, self._seconds = fleet, scaler, seconds
        self._view = View(fleet, router)
        self.moments: list[Moment] = []
        super().__init__(jobs, fleet.pods, router, clock, Random(0))
        self._at(INTERVAL, self._decide, None)

    def _sample_gauges(self, _: Any) -> None:
        now, fleet = self.now, self._fleet
        fleet.pass_time(now)
        self._view.sample(now)
        if now <= self._seconds:
            serving = {role: len(fleet.of(role, State.SERVING)) for role in ROLES}
            self.moments.append(Moment(now, fleet.gpus, dict(fleet.wanted), serving))
        self._at(now + SAMPLE, self._sample_gauges, None)

    def _decide(self, _: Any) -> None:
        for role, count in self._scaler.decide(self.now, self._view.observe(self.now)).items():
            if count != self._fleet.wanted[role]:
                self._fleet.scale(role, count)
        self._at(self.now + INTERVAL, self._decide, None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
