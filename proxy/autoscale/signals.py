"""Signals of the roles of pools from a serving process: waiting requests, predictions, times to first bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import inf
from typing import TYPE_CHECKING, Any

from proxy.autoscale.measures import Buckets, KnownLoad, Recent, replicas_of_role, role_of
from proxy.autoscale.settings import ScalingPolicy
from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.fleet.store import Fleet
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.prefix.exact import ExactIndex
from proxy.prefix.index import PrefixIndex
from proxy.scheduling.build import Scheduling
from proxy.telemetry.metrics import Catalogue

if TYPE_CHECKING:
    from proxy.flowcontrol.controller import FlowControl

Role = tuple[str, str]
"""Names of pool and role."""


class Signals:
    """Signals that pods do not report, of one process or of several: waiting requests by pool, and by role the waiting
    prefill in seconds and the histogram of times to first token."""

    def __init__(self) -> None:
        self.queued: dict[str, int] = {}
        self.backlogs: dict[Role, float] = {}
        """Waiting prefill in seconds by role. A role is missing while its backlog is unknown."""
        self.ttfts: dict[Role, Buckets] = {}
        self.cached_blocks: dict[str, int] = {}
        """Blocks of prompts in the cache of each endpoint, by its name. Each process knows all of them."""

    @staticmethod
    def sum(of: Iterable[Signals]) -> Signals:
        sums = Signals()
        for signals in of:
            for pool, number in signals.queued.items():
                sums.queued[pool] = sums.queued.get(pool, 0) + number
            for role, seconds in signals.backlogs.items():
                sums.backlogs[role] = sums.backlogs.get(role, 0.0) + seconds
            for role, buckets in signals.ttfts.items():
                before = dict(sums.ttfts.get(role, ()))
                sums.ttfts[role] = [(bound, number + before.get(bound, 0.0)) for bound, number in buckets]
            for endpoint, blocks in signals.cached_blocks.items():
                sums.cached_blocks[endpoint] = max(blocks, sums.cached_blocks.get(endpoint, 0))
        return sums

    def as_json(self) -> Any:
        """Return JSON values. The last bound of a histogram, which is infinite, becomes null in JSON."""
        return self.queued, list(self.backlogs.items()), list(self.ttfts.items()), self.cached_blocks

    @staticmethod
    def read(values: Any) -> Signals:
        found = Signals()
        found.queued, backlogs, ttfts, found.cached_blocks = values
        found.backlogs = {(pool, role): seconds for (pool, role), seconds in backlogs}
        for (pool, role), buckets in ttfts:
            found.ttfts[pool, role] = [(inf if most is None else most, number) for most, number in buckets]
        return found


@dataclass(eq=False)
class SignalSource:
    """The source of signals that pods do not report."""

    catalogue: Catalogue
    signals: Signals = field(init=False, default_factory=Signals)
    roles: tuple[Role, ...] = field(init=False, default=())
    _pools: Mapping[str, ScalingPolicy] = field(init=False, default_factory=dict)
    _recent: dict[Role, Recent] = field(init=False, default_factory=dict)

    @property
    def pools(self) -> Mapping[str, ScalingPolicy]:
        """The settings of scaled pools. When they change, the past of removed roles is dropped."""
        return self._pools

    @pools.setter
    def pools(self, pools: Mapping[str, ScalingPolicy]) -> None:
        self._pools = pools
        self.roles = tuple((name, role.name) for name, pool in pools.items() for role in pool.roles)
        self._recent = {role: recent for role, recent in self._recent.items() if role in self.roles}

    async def update(self) -> None:
        """Update `signals`; awaited before every decision."""
        raise NotImplementedError

    def known(self, pool: str, role: str, now: float) -> KnownLoad:
        signals, key = self.signals, (pool, role)
        ttft = self._recent.setdefault(key, Recent()).percentile(now, signals.ttfts.get(key, ()))
        return KnownLoad(signals.queued.get(pool, 0), signals.backlogs.get(key), ttft)

    def cached_blocks(self, endpoint: Endpoint) -> int:
        return self.signals.cached_blocks.get(endpoint.name, 0)

    def read(self) -> None:
        gauge = self.catalogue.prefill_backlog
        gauge.clear()
        for role, backlog in self.signals.backlogs.items():
            if role in self.roles:
                gauge.cell(*role).value = backlog


@dataclass(eq=False)
class OwnSignals(SignalSource, Listener):
    """Signals of one process. Attempts are counted only where `autoscale` names the pool."""

    fleet: Fleet
    clock: Clock
    flow_controls: Callable[[], Mapping[str, FlowControl]]
    schedulings: Callable[[], Mapping[str, Scheduling]]

    def first_byte(self, attempt: Attempt) -> None:
        if attempt.first_byte_at is not None and attempt.stage is Stage.WHOLE:
            self._observe(attempt, attempt.first_byte_at)

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        if attempt.stage is Stage.PREFILL and attempt.succeeded and attempt.last_byte_at is not None:
            self._observe(attempt, attempt.last_byte_at)

    async def update(self) -> None:
        self.signals = self.current()

    def read(self) -> None:
        self.signals = self.current()
        super().read()

    def current(self) -> Signals:
        found = Signals()
        for pool, control in self.flow_controls().items():
            found.queued[pool] = control.queue.length
        for pool, role in self.roles:
            ttft = self.catalogue.role_ttft.cell(pool, role)
            found.ttfts[pool, role] = list(zip((*ttft.bounds, inf), map(float, accumulate(ttft.counts)), strict=True))
            if (backlog := self._backlog(pool, role)) is not None:
                found.backlogs[pool, role] = backlog
        indexes: dict[str, list[PrefixIndex | ExactIndex]] = {
            pool: [
                *(producer.index for producer in scheduling.plugins(ApproxPrefixCacheProducer)),
                *(producer.index for producer in scheduling.plugins(PrecisePrefixCacheProducer)),
            ]
            for pool, scheduling in self.schedulings().items()
            if pool in self.pools
        }
        for endpoint in self.fleet.endpoints if indexes else ():
            if blocks := sum(index.blocks(endpoint) for index in indexes.get(endpoint.pool, ())):
                found.cached_blocks[endpoint.name] = blocks
        return found

    def _observe(self, attempt: Attempt, at: float) -> None:
        endpoint = attempt.endpoint
        pool = self.pools.get(endpoint.pool)
        role = None if pool is None else role_of(pool, endpoint)
        if role is not None and attempt.status is not None and attempt.status < 300:
            self.catalogue.role_ttft.cell(endpoint.pool, role).observe(at - attempt.started_at)

    def _backlog(self, pool: str, role: str) -> float | None:
        scheduling = self.schedulings().get(pool)
        replicas = replicas_of_role(self.pools[pool], role, self.fleet.within(pool).ready)
        pods = list(chain.from_iterable(replicas.values()))
        found = scheduling.plugins(PredictedLatencyProducer) if scheduling is not None and pods else ()
        known = [backlog for one in found if (backlog := one.backlog(pods)) is not None]
        return max(known) * len(replicas) / len(pods) if known else None
