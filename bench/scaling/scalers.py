"""Who says how many replicas each role has: kvlane's loop, and three others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from bench.scaling.fleet import DECODE, PREFILL, ROLES, Shape
from bench.scaling.hard_ratio import HardRatio
from proxy.autoscale.behavior import Behavior, Damping, Panic, ScaleDown, ScaleUp
from proxy.autoscale.demand import Metric, SizedRole, desired_of_role
from proxy.autoscale.loop import Loop, ScalingDecision, ScalingOutcome
from proxy.autoscale.policy import Role, RoleSituation
from proxy.autoscale.settings import ScalingPolicy, load
from proxy.core.params import Duration
from proxy.core.ports import ManualClock

METRICS: Mapping[str, tuple[Metric, ...]] = {
    PREFILL: (Metric("prefill_load", "total", 0.7),),
    DECODE: (Metric("kv_cache_demand_sum", "total", 0.8),),
}
"""What roles are sized by, for all who scale."""

TOLERANCE = 0.1
"""Share that a metric may be off its target: the default of kvlane, of Kubernetes and of kthena."""

HPA = Behavior(
    ScaleUp(4, 100, Duration(15.0), "or", Duration(0.0)),
    ScaleDown(0, 100, Duration(15.0), "or", Duration(300.0)),
    Panic(hold=Duration(0.0)),
)
"""The defaults of Kubernetes: four more or twice as many in 15 s, down to the highest of the last five minutes."""

KTHENA = Behavior(
    ScaleUp(4, 100, Duration(60.0), "or", Duration(0.0)),
    ScaleDown(0, 100, Duration(60.0), "or", Duration(300.0)),
    Panic(hold=Duration(0.0)),
)
"""The defaults of its webhook."""

RATIO = HardRatio(PREFILL, DECODE, 0.5, 2.0)
BANDS = {role: {"min": 33, "max": 67} for role in ROLES}
"""The same as preferred ratios, which kvlane has."""

DOWN = {"stabilization": "90s", "spare": 0.75}
"""How kvlane's roles shrink, as in config/autoscale/prefill-decode.yaml: soon, and with something left."""


class Scaler(Protocol):
    def decide(self, now: float, observed: Mapping[str, RoleSituation]) -> Mapping[str, int]:
        """Replicas by role; what is not named stays as it is."""


class Fixed(Scaler):
    """What there was in the beginning."""

    def decide(self, now: float, observed: Mapping[str, RoleSituation]) -> Mapping[str, int]:
        return {}


class Independent(Scaler):
    """Each role on its own, as a HorizontalPodAutoscaler for each of them. `most` replicas of each."""

    def __init__(self, most: int, behavior: Behavior = HPA) -> None:
        self._most = most
        self._behavior = behavior
        self._damping = {role: Damping() for role in ROLES}
        self._begun: set[str] = set()

    def decide(self, now: float, observed: Mapping[str, RoleSituation]) -> Mapping[str, int]:
        return {role: self._sized(role, now, seen) for role, seen in observed.items()}

    def _sized(self, role: str, now: float, seen: RoleSituation) -> int:
        damping = self._damping[role]
        sized = SizedRole(Role(role, 1, self._most, current=seen.current, ready=seen.ready), seen.metrics)
        wanted = desired_of_role(sized, METRICS[role], TOLERANCE)
        if wanted is None:
            return seen.current
        if role not in self._begun:
            self._begun.add(role)
            damping.start(now, seen.current)
        found, _ = damping.correct(self._behavior, now, seen.current, wanted)
        return found


class Ratio(Independent):
    """The same, after which the quotient of both roles is put right, as kthena does it."""

    def __init__(self, most: int) -> None:
        super().__init__(most, KTHENA)
        self._bounds = dict.fromkeys(ROLES, (1, most))

    def decide(self, now: float, observed: Mapping[str, RoleSituation]) -> Mapping[str, int]:
        return RATIO.repair(dict(super().decide(now, observed)), self._bounds)


class Kvlane(Scaler, AbstractContextManager["Kvlane"]):
    """The production loop, told what it sees and heard what it does; `with`, since it runs in an event loop."""

    def __init__(self, pool: ScalingPolicy, clock: ManualClock) -> None:
        self._runner = asyncio.Runner()
        self._announced: dict[str, int] = {}
        self._loop = Loop("bench", pool, clock, dict.fromkeys(ROLES, self))

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def decide(self, now: float, observed: Mapping[str, RoleSituation]) -> Mapping[str, int]:
        self._announced = {}
        self._runner.run(self._loop.step(observed))
        return self._announced

    async def apply(self, decision: ScalingDecision, role: str) -> ScalingOutcome:
        self._announced[role] = decision.desired[role]
        return ScalingOutcome.OK


def pool(shape: Shape, **changed: Any) -> ScalingPolicy:
    """Return a policy with the default values, except `DOWN`, and the required roles, metrics, ratios and budget."""
    behavior = changed.get("behavior", {})
    sized_by = [(role, [_written(metric) for metric in METRICS[role]]) for role in ROLES]
    section = {
        "mode": "active",
        "roles": [
            {
                "name": role,
                "min": 1,
                "max": shape.most,
                "gpus": shape.gpus,
                "prefillRate": shape.prefill_rate,
                "metrics": metrics,
            }
            for role, metrics in sized_by
        ],
        "gpuBudget": shape.budget,
        **changed,
        "behavior": {**behavior, "scaleDown": {**DOWN, **behavior.get("scaleDown", {})}},
        "coordination": {"mode": "preferred", "preferredRatio": BANDS, **changed.get("coordination", {})},
    }
    return load({"pools": {"bench": section}}).pools["bench"]


def _written(metric: Metric) -> dict[str, Any]:
    return {"name": metric.name, "kind": metric.kind, "target": metric.target}
