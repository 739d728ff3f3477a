"""What an operator may tell the loop: to hold still, to go to a size for a while, and that something was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.autoscale.settings import PoolSettings
from proxy.core.errors import BadRequest
from proxy.core.params import suggestion
from proxy.core.ports import Clock


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Whoever scales from outside has brought these roles to these sizes; `at` is seconds since the Unix epoch."""

    decision: int
    roles: Mapping[str, int]
    at: float


class Controls:
    """Of one pool; it lives as long as its loop."""

    def __init__(self, pool: PoolSettings, clock: Clock) -> None:
        self._clock = clock
        self._overrides: dict[str, tuple[int, float]] = {}
        self.pool = pool
        self.paused = False
        self.acknowledged: Acknowledged | None = None

    @property
    def pool(self) -> PoolSettings:
        """The policy. Where it changes, an order that the new bounds do not allow is void."""
        return self._pool

    @pool.setter
    def pool(self, pool: PoolSettings) -> None:
        self._pool = pool
        self._bounds = bounds = {role.name: (role.min, role.max) for role in pool.roles}
        self._overrides = {
            role: one
            for role, one in self._overrides.items()
            if role in bounds and bounds[role][0] <= one[0] <= bounds[role][1]
        }

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def override(self, roles: Mapping[str, int], ttl: float) -> None:
        """For `ttl` seconds from now. Takes all roles or none; raises BadRequest."""
        if ttl <= 0:
            raise BadRequest("The ttl must be more than 0.", param="ttl")
        for role, count in roles.items():
            low, high = self._known(role)
            if not low <= count <= high:
                raise BadRequest(f"Role '{role}' has {low} to {high} replicas, not {count}.", param=f"roles.{role}")
        until = self._clock.now() + ttl
        self._overrides |= {role: (count, until) for role, count in roles.items()}

    def overrides(self) -> dict[str, int]:
        """Those that hold now."""
        now = self._clock.now()
        self._overrides = {role: one for role, one in self._overrides.items() if one[1] > now}
        return {role: count for role, (count, _) in self._overrides.items()}

    def acknowledge(self, decision: int, roles: Mapping[str, int], latest: int) -> None:
        """Raises BadRequest for a role that is not there or a decision after the latest."""
        for role in roles:
            self._known(role)
        if not 0 < decision <= latest:
            raise BadRequest(f"There is no decision {decision}.", param="decision_id")
        self.acknowledged = Acknowledged(decision, dict(roles), self._clock.wall())

    def _known(self, role: str) -> tuple[int, int]:
        if role not in self._bounds:
            hint = suggestion(role, list(self._bounds))
            raise BadRequest(f"There is no role '{role}'{hint}.", param=f"roles.{role}")
        return self._bounds[role]
