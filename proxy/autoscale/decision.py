"""A decision of the loop at one moment, with its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.autoscale.policy import RoleSituation
from proxy.autoscale.recommender import Recommendation

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
        return {
            "pool": self.pool,
            "decision_id": self.id,
            "ts": self.at,
            "valid": self.valid,
            "mode": self.mode,
            "panic": found is not None and found.panic,
            "gated": found is not None and found.gated,
            "over_budget": found is not None and found.over_budget,
            "total": self._total(),
            "coordination": self._coordination(),
            "roles": {name: self._role(name) for name in self.bounds},
        }

    def _total(self) -> dict[str, Any]:
        found = self.recommendation
        return {
            "current": sum(one.current for one in self.situations.values()),
            "raw": found.raw if found else None,
            "corrected": found.corrected if found else None,
            "min": sum(low for low, _ in self.bounds.values()),
            "max": sum(high for _, high in self.bounds.values()),
        }

    def _coordination(self) -> dict[str, Any]:
        if self.recommendation is None:
            return {"applied": None, "band_satisfied": None, "reasons": []}
        result = self.recommendation.result
        return {
            "applied": result.applied,
            "band_satisfied": result.band_satisfied,
            "reasons": [reason.value for reason in result.reasons],
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
