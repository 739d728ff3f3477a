"""The loop of one pool: recommend, record the decision with its inputs, and, in active mode, act."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from proxy.autoscale.policy import RoleSituation
from proxy.autoscale.recommender import Recommendation, Recommender
from proxy.autoscale.settings import RoleSettings, ScalingPolicy
from proxy.core.errors import BadRequest
from proxy.core.params import suggestion
from proxy.core.ports import Clock

log = logging.getLogger(__name__)


HISTORY = 1000
"""Number of stored decisions, each with its inputs: four hours of decisions at the default interval."""

PATIENCE = 10.0
"""Seconds for an action."""


Mode = Literal["dry_run", "active", "paused"]


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """One decision. `desired` is the target size by role: recommended, held or ordered by an operator. If the fleet was
    not observable, the recommendation is None, the last values are held, and `valid` is false. `at` is seconds since
    the Unix epoch; `bounds` are (min, max) by role, `missing` the names of missing metrics and signals by role."""

    id: int
    at: float
    pool: str
    mode: Mode
    recommendation: Recommendation | None
    desired: Mapping[str, int]
    situations: Mapping[str, RoleSituation]
    bounds: Mapping[str, tuple[int, int]]
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()

    @property
    def valid(self) -> bool:
        return self.recommendation is not None

    def as_dict(self) -> dict[str, Any]:
        """Return the decision ready for JSON, with all data to repeat it under another policy."""
        found = self.recommendation
        result = found.result if found else None
        return {
            "pool": self.pool,
            "decision_id": self.id,
            "ts": self.at,
            "valid": self.valid,
            "mode": self.mode,
            "panic": found is not None and found.panic,
            "gated": found is not None and found.gated,
            "over_budget": found is not None and found.over_budget,
            "total": {
                "current": sum(one.current for one in self.situations.values()),
                "raw": found.raw if found else None,
                "corrected": found.corrected if found else None,
                "min": sum(low for low, _ in self.bounds.values()),
                "max": sum(high for _, high in self.bounds.values()),
            },
            "coordination": {
                "applied": result.applied if result else None,
                "band_satisfied": result.band_satisfied if result else None,
                "reasons": [reason.value for reason in result.reasons] if result else [],
            },
            "roles": {name: self._role(name) for name in self.bounds},
        }

    def _role(self, name: str) -> dict[str, Any]:
        """Return one role ready for JSON. Unknown values are null, never 0."""
        seen, low_high = self.situations.get(name), self.bounds[name]
        result = self.recommendation.result if self.recommendation else None
        return {
            "current": seen.current if seen else None,
            "ready": seen.ready if seen else None,
            "draining": seen.draining if seen else None,
            "desired": self.desired.get(name),
            "min": low_high[0],
            "max": low_high[1],
            "overridden": name in self.overridden,
            "pressure": result.pressure.get(name) if result else None,
            "share": {kind: shares.get(name) for kind, shares in result.shares.items()} if result else None,
            "metrics": dict(seen.metrics) if seen else {},
            "signals": dict(seen.signals) if seen else {},
            "missing": list(self.missing.get(name, ())),
        }


class ScalingOutcome(Enum):
    OK = "ok"
    BUSY = "busy"
    REFUSED = "refused"
    ERROR = "error"
    DRY_RUN = "dry_run"


class Actuator(Protocol):
    """An actuator of roles. It is called repeatedly until the role has the size, so it must not repeat an action that
    it has started."""

    async def apply(self, decision: ScalingDecision, role: str) -> ScalingOutcome: ...


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """An external scaler has brought these roles to these sizes; `at` is seconds since the Unix epoch."""

    decision: int
    roles: Mapping[str, int]
    at: float


@dataclass(eq=False)
class Loop:
    """The loop of one pool: it decides and acts, once per `step`, as an operator has ordered it. Roles without one of
    the `actuators` are scaled by external scalers, which read `latest`. `patience` is the time for an action, in
    seconds."""

    name: str
    pool: ScalingPolicy
    """The policy. When it changes, decisions and overrides within the new bounds are kept."""
    clock: Clock
    actuators: Mapping[str, Actuator] = field(default_factory=dict)
    patience: float = PATIENCE
    paused: bool = field(init=False, default=False)
    acknowledged: Acknowledged | None = field(init=False, default=None)
    history: deque[ScalingDecision] = field(init=False, default_factory=lambda: deque(maxlen=HISTORY))
    outcomes: dict[str, ScalingOutcome] = field(init=False, default_factory=dict)
    """Results by role of the latest decision that required another size."""
    _overrides: dict[str, tuple[int, float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._recommender = Recommender(self.pool)

    @property
    def latest(self) -> ScalingDecision | None:
        return self.history[-1] if self.history else None

    @property
    def recommended(self) -> Recommendation | None:
        """Return the latest recommendation in the stored decisions."""
        return next((one.recommendation for one in reversed(self.history) if one.valid), None)

    async def step(self, situations: Mapping[str, RoleSituation]) -> ScalingDecision:
        """Decide and act. A role is missing in `situations` while its replicas are not known."""
        decision = self._decide(situations)
        self.history.append(decision)
        self.outcomes = {role: await self._act(decision, role) for role in _to_change(decision)}
        return decision

    def override(self, roles: Mapping[str, int], ttl: float) -> None:
        """Set the sizes of roles for `ttl` seconds from now, of all roles or none. Raise BadRequest."""
        if ttl <= 0:
            raise BadRequest("The ttl must be more than 0.", param="ttl")
        self._check_roles(roles)
        for role, count in roles.items():
            low, high = self.pool.bounds[role]
            if not low <= count <= high:
                raise BadRequest(f"Role '{role}' has {low} to {high} replicas, not {count}.", param=f"roles.{role}")
        until = self.clock.now() + ttl
        self._overrides |= {role: (count, until) for role, count in roles.items()}

    def overrides(self) -> dict[str, int]:
        """Return the overrides that have not expired."""
        now, bounds = self.clock.now(), self.pool.bounds
        self._overrides = {
            role: (count, until)
            for role, (count, until) in self._overrides.items()
            if until > now and role in bounds and bounds[role][0] <= count <= bounds[role][1]
        }
        return {role: count for role, (count, _) in self._overrides.items()}

    def acknowledge(self, decision: int, roles: Mapping[str, int]) -> None:
        """Record the result of an external scaler. Raise BadRequest for an unknown role or a decision after the
        latest."""
        self._check_roles(roles)
        if self.latest is None or not 0 < decision <= self.latest.id:
            raise BadRequest(f"There is no decision {decision}.", param="decision_id")
        self.acknowledged = Acknowledged(decision, dict(roles), self.clock.wall())

    def _check_roles(self, roles: Mapping[str, int]) -> None:
        for role in roles:
            if role not in self.pool.bounds:
                hint = suggestion(role, list(self.pool.bounds))
                raise BadRequest(f"There is no role '{role}'{hint}.", param=f"roles.{role}")

    def _decide(self, situations: Mapping[str, RoleSituation]) -> ScalingDecision:
        complete = len(situations) == len(self.pool.roles)
        self._recommender.pool = self.pool
        found = self._recommender.recommend(self.clock.now(), situations) if complete else None
        mode: Mode = "paused" if self.paused else self.pool.mode
        overrides = self.overrides()
        recommended = self._held(situations) if found is None or mode == "paused" else found.replicas
        return ScalingDecision(
            id=self.latest.id + 1 if self.latest else 1,
            at=self.clock.wall(),
            pool=self.name,
            mode=mode,
            recommendation=found,
            desired={**recommended, **overrides},
            situations=situations,
            bounds=self.pool.bounds,
            missing={role.name: _missing(self.pool, role, situations.get(role.name)) for role in self.pool.roles},
            overridden=frozenset(overrides),
        )

    def _held(self, situations: Mapping[str, RoleSituation]) -> dict[str, int]:
        """Return the latest decision without overrides, or the current sizes of roles without a decision."""
        held = {name: one.current for name, one in situations.items()}
        if self.latest is None:
            return held
        known = self.pool.bounds.keys() - self.latest.overridden
        return held | {name: count for name, count in self.latest.desired.items() if name in known}

    async def _act(self, decision: ScalingDecision, role: str) -> ScalingOutcome:
        """Act on a decision. A dry run does everything except this."""
        actuator = self.actuators.get(role)
        if decision.mode != "active" or actuator is None:
            return ScalingOutcome.DRY_RUN
        try:
            async with asyncio.timeout(self.patience):
                return await actuator.apply(decision, role)
        except Exception:  # it is tried again with the next decision
            log.warning("autoscale: pool %s: failed to scale role %s", self.name, role, exc_info=True)
            return ScalingOutcome.ERROR


def _to_change(decision: ScalingDecision) -> list[str]:
    """Return the roles to scale: growing roles first, so that capacity does not drop in between."""
    change = {
        name: decision.desired[name] - one.current
        for name, one in decision.situations.items()
        if name in decision.desired and (decision.valid or name in decision.overridden)
    }
    return sorted((name for name, by in change.items() if by), key=lambda name: -change[name])


def _missing(pool: ScalingPolicy, role: RoleSettings, seen: RoleSituation | None) -> tuple[str, ...]:
    looked_at = pool.coordination.looked_at(role.name) if pool.coordination.mode == "preferred" else []
    return (
        *(one.name for one in pool.metrics_of(role) if seen is None or seen.metrics.get(one.name) is None),
        *(name for name, _, _ in looked_at if seen is None or name not in seen.signals),
    )
