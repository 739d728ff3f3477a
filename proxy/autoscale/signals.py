"""What a process that serves knows of the roles of its pools: waiting requests, predictions, times to first bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.autoscale.measures import Buckets, Known, ScaledPools, pods_of_role, role_of
from proxy.core.attempt import Attempt, Stage
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.fleet.store import Fleet
from proxy.flowcontrol.controller import FlowControl
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.scheduling.build import Scheduling
from proxy.telemetry.metrics import Catalogue, Histogram


class Senses(Protocol):
    """Where the autoscaler learns what pods do not report."""

    async def look(self) -> None:
        """Before every decision."""

    def known(self, pool: str, role: str, now: float) -> Known: ...


class OwnSenses(ScaledPools, Listener):
    """Signals of one process. Attempts are counted only where `autoscale` names the pool."""

    def __init__(
        self,
        fleet: Fleet,
        catalogue: Catalogue,
        clock: Clock,
        flow_controls: Callable[[], Mapping[str, FlowControl]],
        schedulings: Callable[[], Mapping[str, Scheduling]],
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._catalogue = catalogue
        self._clock = clock
        self._flow_controls = flow_controls
        self._schedulings = schedulings

    def first_byte(self, attempt: Attempt) -> None:
        if attempt.first_byte_at is not None and attempt.stage is Stage.WHOLE:
            self._observe(attempt, attempt.first_byte_at)

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        if attempt.stage is Stage.PREFILL and attempt.succeeded and attempt.last_byte_at is not None:
            self._observe(attempt, attempt.last_byte_at)

    async def look(self) -> None:
        """It is all there."""

    def known(self, pool: str, role: str, now: float) -> Known:
        flow_control = self._flow_controls().get(pool)
        waiting = 0 if flow_control is None else flow_control.queue.waiting
        ttft = self.recent(pool, role, now, buckets_of(self._catalogue.leg_ttft.cell(pool, role)))
        return Known(waiting, self._backlog(pool, role), ttft)

    def read(self) -> None:
        """For an exposition."""
        gauge = self._catalogue.prefill_backlog
        gauge.clear()
        for pool, role in self.roles:
            if (backlog := self._backlog(pool, role)) is not None:
                gauge.cell(pool, role).value = backlog

    def _observe(self, attempt: Attempt, at: float) -> None:
        endpoint = attempt.endpoint
        pool = self.pools.get(endpoint.pool)
        role = None if pool is None else role_of(pool, endpoint)
        if role is not None and attempt.status is not None and attempt.status < 300:
            self._catalogue.leg_ttft.cell(endpoint.pool, role).observe(at - attempt.started_at)

    def _backlog(self, pool: str, role: str) -> float | None:
        scheduling = self._schedulings().get(pool)
        pods = pods_of_role(self.pools[pool], role, self._fleet.within(pool).ready)
        found = scheduling.plugins(PredictedLatencyProducer) if scheduling is not None and pods else ()
        known = [backlog for one in found if (backlog := one.backlog(pods)) is not None]
        replicas = sum(pod is pod.lead for pod in pods)
        return max(known) * replicas / len(pods) if known else None


def buckets_of(histogram: Histogram) -> Buckets:
    counted, found = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        counted += count
        found.append((bound, float(counted)))
    return found
