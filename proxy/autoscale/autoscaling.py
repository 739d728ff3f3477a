"""The autoscaler of a process that polls the pods: a loop for each pool with a policy, its metrics, and its lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from proxy.autoscale.policy import Cause, Result
from proxy.autoscale.settings import AutoscaleSettings, ScalingPolicy
from proxy.autoscale.signals import SignalSource
from proxy.cluster.settings import ReplicaSettings
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.store import Fleet
from proxy.telemetry.metrics import Catalogue

if TYPE_CHECKING:
    from proxy.autoscale.loop import ScalingDecision
    from proxy.autoscale.recommender import Recommendation
    from proxy.autoscale.scaled_pool import ScaledPool
    from proxy.cluster.redis_transport import Lease

log = logging.getLogger(__name__)

LEASE = "autoscale"
LEASE_SECONDS = 30.0
"""Duration of a lease; it is renewed after a third of that."""


class Autoscaling:
    """The scaled pools of a process. `pools` by name, from `start` on; they keep their state when settings change."""

    def __init__(
        self,
        settings: AutoscaleSettings,
        replicas: ReplicaSettings,
        fleet: Fleet,
        signals: SignalSource,
        catalogue: Catalogue,
        clock: Clock,
        rng: Random,
    ) -> None:
        self._replicas = replicas
        self._settings = settings
        self._catalogue = catalogue
        self.leadership = Leadership(clock)

        def make_pool(name: str, settings: ScalingPolicy) -> ScaledPool:
            from proxy.autoscale.scaled_pool import ScaledPool  # with its actuators, only if a pool has a policy

            return ScaledPool(name, settings, fleet, signals, clock, rng, lambda: self.leadership.is_ours, self._ask)

        self._make_pool = make_pool
        self._tasks: Tasks | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self.pools: dict[str, ScaledPool] = {}
        self.on_first_pool: Callable[[], None] = lambda: None

    async def start(self, stack: AsyncExitStack) -> None:
        """Start scaling; call it when the pods are known."""
        if self._replicas.is_shared:
            from proxy.autoscale.loop import PATIENCE
            from proxy.cluster.redis_transport import Lease

            lease = Lease(self._replicas, LEASE, LEASE_SECONDS)
            await self.leadership.share(stack, lease, LEASE_SECONDS / 3, margin=PATIENCE)
        self._tasks = await stack.enter_async_context(Tasks())
        self._apply()

    @property
    def settings(self) -> AutoscaleSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: AutoscaleSettings) -> None:
        self._settings = settings
        if self._tasks is not None:
            self._apply()

    def pause_all(self) -> None:
        """Stop all scaling of the process until an operator resumes the pools, one by one."""
        log.warning("autoscale: all pools are paused")
        for pool in self.pools.values():
            pool.loop.paused = True

    def read(self) -> None:
        """Fill the gauges for an exposition; removed roles and pools have none."""
        c = self._catalogue
        for family in (
            *(c.desired_replicas, c.current_replicas, c.ready_replicas, c.desired_ratio, c.total_recommended),
            *(c.pressure, c.signal, c.signal_missing, c.share, c.band_satisfied, c.autoscale_reason),
            *(c.autoscale_panic, c.autoscale_valid, c.decided_at, c.draining_replicas, c.drain_ready_replicas),
            *(c.scaling_decisions, c.actuations),
        ):
            family.clear()
        for name, pool in self.pools.items():
            for (role, direction, reason), number in pool.decisions.items():
                c.scaling_decisions.cell(name, role, direction, reason).add(number)
            for (role, actuator, result), number in pool.actuations.items():
                c.actuations.cell(name, role, actuator, result).add(number)
            if (decision := pool.loop.latest) is not None:
                self._read_pool(name, decision, pool.loop.recommended)
                self._read_drains(name, pool)

    def _apply(self) -> None:
        assert self._tasks is not None
        for name in self.pools.keys() - self._settings.pools.keys():
            self._running.pop(name).cancel()
            self.pools.pop(name).end()
        if self._settings.pools and not self.pools:
            self.on_first_pool()
        for name, settings in self._settings.pools.items():
            if name in self.pools:
                self.pools[name].settings = settings
                continue
            pool = self.pools[name] = self._make_pool(name, settings)
            self._running[name] = self._tasks.keep(partial(self._run, pool), "autoscaling", name)

    async def _ask(self, query: str) -> float:
        from proxy.autoscale.prometheus import ask

        return await ask(self._settings.prometheus, query)

    async def _run(self, pool: ScaledPool) -> None:
        while True:
            try:
                async with self.leadership.cut_off():
                    await pool.step()
            except Exception:  # the next one may be better; until then the last one holds
                log.exception("autoscale: pool %s: a step failed", pool.name)
            await asyncio.sleep(self._settings.interval)

    def _read_pool(self, name: str, decision: ScalingDecision, found: Recommendation | None) -> None:
        """Fill the gauges of a pool. `found` is the latest recommendation: it holds while the fleet is not
        observable."""
        c = self._catalogue
        c.autoscale_valid.cell(name).value = float(decision.valid)
        c.decided_at.cell(name).value = decision.at
        c.autoscale_panic.cell(name).value = float(found is not None and found.panic)
        for role in decision.bounds:
            self._read_role(name, role, decision)
            if found is not None:
                self._read_shares(name, role, found.result)
        if found is None:
            return
        c.total_recommended.cell(name, "raw").value = found.raw
        c.total_recommended.cell(name, "corrected").value = found.corrected
        if found.result.band_satisfied is not None:
            c.band_satisfied.cell(name).value = float(found.result.band_satisfied)
        for reason in Cause:
            c.autoscale_reason.cell(name, reason.value).value = float(reason in found.result.reasons)

    def _read_role(self, pool: str, role: str, decision: ScalingDecision) -> None:
        """Fill the gauges of a role. Unknown values are not exposed; they are never 0."""
        c, seen, desired = self._catalogue, decision.situations.get(role), decision.desired.get(role)
        if desired is not None:
            c.desired_replicas.cell(pool, role).value = desired
        if seen is not None:
            c.current_replicas.cell(pool, role).value = seen.current
            c.ready_replicas.cell(pool, role).value = seen.ready
            for name, value in {**seen.metrics, **seen.signals}.items():
                if isinstance(value, int | float):
                    c.signal.cell(pool, role, name).value = value
        if desired is not None and seen is not None and seen.current:
            c.desired_ratio.cell(pool, role).value = desired / seen.current
        missing = decision.missing.get(role, ())
        for name in {*missing, *(seen.metrics if seen else ()), *(seen.signals if seen else ())}:
            c.signal_missing.cell(pool, role, name).value = float(name in missing)

    def _read_shares(self, pool: str, role: str, result: Result) -> None:
        for kind, shares in result.shares.items():
            if role in shares:
                self._catalogue.share.cell(pool, role, kind).value = shares[role]
        if (pressure := result.pressure.get(role)) is not None:
            self._catalogue.pressure.cell(pool, role).value = pressure

    def _read_drains(self, name: str, pool: ScaledPool) -> None:
        for role in pool.settings.roles:
            states = [one["state"] for one in pool.drains.described(role.name)]
            self._catalogue.draining_replicas.cell(name, role.name).value = states.count("draining")
            self._catalogue.drain_ready_replicas.cell(name, role.name).value = states.count("drain_ready")


@dataclass(slots=True)
class Leadership:
    """Leader election: whether this process scales. Always true if no other process can."""

    clock: Clock
    _until: float = inf
    _wall_until: float = inf
    _ends_at: float | None = None
    """End of the lease, by the clock of the event loop."""
    _running: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def is_ours(self) -> bool:
        """Return whether this process holds the lease. A process that was suspended has lost it before it can renew it.
        The monotonic clock stands still while the machine is suspended, and the wall clock may be set back, so both
        count."""
        return self.clock.now() < self._until and self.clock.wall() < self._wall_until

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        """Cancel the body at the end of the lease, unless the lease is renewed before. Raise TimeoutError then."""
        async with asyncio.timeout_at(self._ends_at if self.is_ours else None) as timeout:
            self._running.add(timeout)
            try:
                yield
            finally:
                self._running.remove(timeout)

    async def share(self, stack: AsyncExitStack, lease: Lease, every: float, margin: float = 0.0) -> None:
        """Acquire the lease, and renew it every so many seconds. No action starts in the last `margin` seconds of the
        lease, so that most end in time."""
        self._until = -inf
        stack.push_async_callback(self._end, lease)
        tasks = await stack.enter_async_context(Tasks())
        tasks.keep(lambda: self._keep(lease, every, margin), "lease-of-the-autoscaler")

    async def _keep(self, lease: Lease, every: float, margin: float) -> None:
        was_ours, loop = False, asyncio.get_running_loop()
        while True:
            requested_at, wall, ends_at = self.clock.now(), self.clock.wall(), loop.time() + lease.seconds
            taken = await lease.acquire()
            if taken is not was_ours:
                log.info("autoscale: this proxy %s", "scales from here on" if taken else "leaves scaling to another")
            was_ours, held = taken, lease.seconds - margin
            self._until, self._wall_until = (requested_at + held, wall + held) if taken else (-inf, -inf)
            if taken:
                self._ends_at = ends_at
                for timeout in self._running:
                    if not timeout.expired():
                        timeout.reschedule(ends_at)
            await asyncio.sleep(every)

    async def _end(self, lease: Lease) -> None:
        if self.is_ours:
            await lease.release()
        self._until = -inf
        await lease.close()
