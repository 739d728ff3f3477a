"""The autoscaler of one pool: its loop, its view of the fleet, its drains and its actuator."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.autoscale.actuators import Command, Compose, GuardedActuator, Kubernetes, Scaler, Webhook
from proxy.autoscale.drains import DrainingReplica, Drains, Orders
from proxy.autoscale.loop import PATIENCE, Actuator, Loop, ScalingDecision
from proxy.autoscale.measures import Measured, RoleSamples, metrics_of, replicas_of_role, signals_of
from proxy.autoscale.policy import RoleSituation
from proxy.autoscale.prometheus import Ask, Queries
from proxy.autoscale.settings import ActuatorSettings, RoleSettings, ScalingPolicy
from proxy.autoscale.signals import SignalSource
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.ports import Clock, Random
from proxy.fleet.store import AUTOSCALER, Fleet

log = logging.getLogger(__name__)

FIRST_SIGHT = 60.0
"""Seconds for the discovery of pods of a role that is never empty: until then, no pods means that the state is unknown
and not that all are gone."""

_ORDINAL = re.compile(r"-(\d+)$")


class ScaledPool:
    """The autoscaler of one pool. Its state survives reloads: it lives from the first policy of the pool to the
    last."""

    def __init__(
        self,
        name: str,
        settings: ScalingPolicy,
        fleet: Fleet,
        signals: SignalSource,
        clock: Clock,
        rng: Random,
        is_leader: Callable[[], bool],
        ask: Ask,
    ) -> None:
        """`is_leader` returns whether this proxy holds the scaling lease; `ask` evaluates queries."""
        self.name = name
        self._fleet = fleet
        self._signals = signals
        self._clock = clock
        self._random = rng
        self._is_leader = is_leader
        self._began = clock.now()
        self._seen: set[str] = set()
        self._cleared: set[str] = set()
        self._queries = Queries(ask, clock)
        self._taken: dict[str, RoleSamples] = {}
        self._settings = settings
        self.orders = Orders(clock)
        self.drains = Drains(settings.drain, self, clock)
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        """Counts by role, direction and reason; the next attribute by role, actuator and result."""
        self.actuations: Counter[tuple[str, str, str]] = Counter()
        self._guard = self._make_guard(settings.actuator)
        self.loop = Loop(name, settings, clock, self._actuators(), patience=_patience(settings))

    @property
    def settings(self) -> ScalingPolicy:
        """The policy. When it changes, observations, decisions and orders are kept."""
        return self._settings

    @settings.setter
    def settings(self, settings: ScalingPolicy) -> None:
        for role in self._settings.roles:
            if role.name not in settings.bounds or settings.mode != "active":
                self.drains.cancel(role.name)
        if settings.actuator != self._settings.actuator:
            self._guard = self._make_guard(settings.actuator)
        self._settings, self.drains.settings = settings, settings.drain
        for counted in (self.decisions, self.actuations):
            for key in [key for key in counted if key[0] not in settings.bounds]:
                del counted[key]
        self.loop.pool, self.loop.actuators, self.loop.patience = settings, self._actuators(), _patience(settings)

    def end(self) -> None:
        """End the scaling of the pool: draining pods return to service."""
        for role in self.settings.roles:
            self.drains.cancel(role.name)

    async def step(self) -> ScalingDecision:
        await self._signals.update()
        await self._queries.update(self.settings)
        if self._is_leader():
            self.drains.inherit(role.name for role in self.settings.roles)
        try:
            situations = self._situations()
        except Exception:  # nothing was seen: the last values are held, and overrides apply
            log.warning("autoscale: failed to read the state of pool %s", self.name, exc_info=True)
            situations = {}
        decision = await self.loop.step(situations)
        self._count(decision)
        for role in decision.situations:
            await self._let_back(decision, role)
        await self._clear_marks(decision)
        return decision

    # What the loop sees.

    def _situations(self) -> dict[str, RoleSituation]:
        now, found = self._clock.now(), {}
        for role in self.settings.roles:
            replicas = self._replicas(role.name)
            if replicas:
                self._seen.add(role.name)
            elif role.min > 0 and role.name not in self._seen and now - self._began < FIRST_SIGHT:
                continue
            found[role.name] = self._observed(role, replicas.values(), now)
        return found

    def _observed(self, role: RoleSettings, replicas: Collection[Sequence[Endpoint]], now: float) -> RoleSituation:
        ready = [serving for ranks in replicas if (serving := _ready(ranks))]
        taken = self._taken.setdefault(role.name, RoleSamples()).rate(now, ready)
        known = replace(self._signals.known(self.name, role.name, now), taken=taken)
        measured = Measured(ready, known, now, self.settings.stale_after, role.prefill_rate, self._queries.values)
        return RoleSituation(
            current=self.orders.current(role.name, len(replicas)),
            ready=len(ready),
            draining=sum(map(_is_draining, replicas)),
            metrics=metrics_of(self.settings, role, measured),
            signals=signals_of(self.settings, role, measured),
        )

    # What drains ask and do.

    def replicas(self, role: str) -> Sequence[DrainingReplica]:
        return [self._replica(name, ranks) for name, ranks in self._replicas(role).items()]

    def drain(self, name: str) -> None:
        for pod in self._pods_named(name):
            self._fleet.drain(pod, AUTOSCALER)

    def undrain(self, name: str) -> None:
        for pod in self._pods_named(name):
            self._fleet.undrain(pod, AUTOSCALER)

    # What is shown.

    def described(self, decision: ScalingDecision) -> dict[str, Any]:
        """Return the state with the draining pods, ready for JSON."""
        found = decision.as_dict()
        for name, role in found["roles"].items():
            role["drain"] = self.drains.described(name)
        return {**found, "leads": self._is_leader()}

    def acknowledge(self, decision: int, roles: Mapping[str, int]) -> None:
        """Record the result of an external scaler. Raise BadRequest."""
        self.loop.acknowledge(decision, roles)
        for role, count in roles.items():
            self.orders.put(role, count)

    def _wanted(self) -> Iterator[Endpoint]:
        """Yield the endpoints of the pool in any state, without pods that are being removed."""
        return (one for one in self._fleet.endpoints if one.pool == self.name and not self._fleet.is_leaving(one))

    def _replicas(self, role: str) -> dict[str, list[Endpoint]]:
        return replicas_of_role(self.settings, role, self._wanted())

    def _pods_named(self, replica: str) -> set[str]:
        """Return the pods of the fleet that belong to this replica: several if each rank has a port."""
        return {one.pod_name for one in self._wanted() if one.replica_name == replica}

    def _replica(self, name: str, ranks: Sequence[Endpoint]) -> DrainingReplica:
        ordinal = _ORDINAL.search(name)
        return DrainingReplica(
            name,
            ready=bool(_ready(ranks)),
            draining=_is_draining(ranks),
            is_victim=any(AUTOSCALER in self._fleet.drained_by(rank) for rank in ranks),
            inflight=sum(rank.load.requests for rank in ranks),
            cached_blocks=sum(map(self._signals.cached_blocks, ranks)),
            ordinal=int(ordinal[1]) if ordinal else None,
            started=max(rank.metrics.process_started for rank in ranks),
            url=ranks[0].url,
            group=ranks[0].labels.get(self.settings.drain.group_label),
        )

    async def _let_back(self, decision: ScalingDecision, role: str) -> None:
        """Return draining replicas to service, unless they are still to be removed or their removal was ordered."""
        self.drains.forget_gone(role)
        there = len(self._replicas(role))
        if not self.orders.is_open(role, there):
            self.drains.removal_over(role)
        acts = decision.mode == "active" and self._is_leader()
        if self._guard is None:
            self.drains.cancel(role)
        elif not acts or decision.desired.get(role, 0) >= there:
            await self._guard.cancel(role)

    async def _clear_marks(self, decision: ScalingDecision) -> None:
        """Clear the marks of pods that an earlier proxy chose for removal; runs once."""
        if self._guard is None or decision.mode != "active" or not self._is_leader():
            return
        for role in self._guard.settings.owned(tuple(decision.situations)):
            if role in decision.situations and role not in self._cleared:
                self._cleared.add(role)
                going = self.drains.names(role)
                await self._guard.mark([name for name in self._replicas(role) if name not in going], doomed=False)

    def _make_guard(self, settings: ActuatorSettings | None) -> GuardedActuator | None:
        if settings is None:
            return None
        self.orders.startup = settings.startup
        scaler = scaler_of(settings, self._clock)
        return GuardedActuator(settings, scaler, self.drains, self.orders, self._clock, self._random, self._is_leader)

    def _actuators(self) -> dict[str, Actuator]:
        roles = tuple(role.name for role in self._settings.roles)
        return {} if self._guard is None else dict.fromkeys(self._guard.settings.owned(roles), self._guard)

    def _count(self, decision: ScalingDecision) -> None:
        found = decision.recommendation
        reasons = found.result.reasons if found is not None else ()
        why = reasons[0].value if reasons else "" if found is not None else "Blind"
        for role, seen in decision.situations.items():
            by = decision.desired.get(role, seen.current) - seen.current
            direction = "up" if by > 0 else "down" if by < 0 else "none"
            self.decisions[role, direction, "Override" if role in decision.overridden else why] += 1
        actuator = self.settings.actuator.type if self.settings.actuator is not None else "none"
        for role, outcome in self.loop.outcomes.items():
            self.actuations[role, actuator, outcome.value] += 1


def _ready(ranks: Sequence[Endpoint]) -> list[Endpoint]:
    return [rank for rank in ranks if rank.state is EndpointState.READY]


def _is_draining(ranks: Sequence[Endpoint]) -> bool:
    """Return whether a replica drains. A replica serves while one of its ranks is ready."""
    return not _ready(ranks) and any(rank.state is EndpointState.DRAINING for rank in ranks)


def _patience(settings: ScalingPolicy) -> float:
    """Return the time for an action. It allows an actuator two calls: one to mark pods, and one to scale."""
    return PATIENCE if settings.actuator is None else max(PATIENCE, 2 * settings.actuator.timeout)


def scaler_of(acting: ActuatorSettings, clock: Clock) -> Scaler:
    if acting.type == "webhook":
        return Webhook(acting.url, acting.secret, acting.timeout, clock.wall)
    if acting.type == "exec":
        return Command(acting.command, acting.timeout)
    if acting.type == "compose":
        return Compose(acting.targets, acting.timeout, acting.project, acting.directory)
    return Kubernetes(acting.targets, acting.timeout, acting.access)
