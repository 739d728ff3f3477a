"""The `autoscale` section: which roles there are, what they are sized by, and how fast and how they may change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.autoscale.acting import ActuatorSettings, DrainSettings
from proxy.autoscale.behavior import Behavior
from proxy.autoscale.cost import EXPANSION
from proxy.autoscale.policy import PREFILL_LOAD, Coordination, Role
from proxy.autoscale.sources import PROMQL, PrometheusSettings
from proxy.autoscale.total import Metric
from proxy.autoscale.validation import coordination_faults, role_faults
from proxy.core import params
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Invalid, camel, join, param
from proxy.core.units import Duration

PATH = "autoscale"


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """One role of a pool."""

    name: str = param(doc="what metrics, answers and preferred ratios call it")
    min: int = param(doc="replicas that it has at least", at_least=0)
    max: int = param(doc="replicas that it has at most", at_least=1)
    selector: Mapping[str, str] = param(
        {}, "labels of its pods; unless given those of the role of this name, or all pods where there is but one role"
    )
    cost: float = param(1.0, "of a replica, against the other roles", at_least=0)
    weight: float = param(1.0, "its part of the total, with baseline: weights", at_least=0)
    gpus: float = param(1.0, "of a replica", at_least=0)
    metrics: tuple[Metric, ...] = param((), "what it is sized by; the one that asks for most decides")
    prefill_rate: float | None = param(
        None, "uncached prompt tokens that a replica computes per second; null: as latencies tell", more_than=0
    )
    externally_owned: bool = param(False, "others scale it by what is recommended: an HPA, KEDA, a person")

    def sized(self, current: int | None, ready: int | None) -> Role:
        return Role(self.name, self.min, self.max, self.cost, self.weight, current, ready)


@dataclass(frozen=True, slots=True)
class CoordinationSettings(Coordination):
    """How the total is divided among roles."""

    alpha: float = param(0.25, "what pressure counts for against the baseline", at_least=0, at_most=1)
    baseline: Literal["cost", "current", "weights", "demand"] = param(
        "demand", "what the shares would be without pressure; with total: joint, demand is current"
    )
    hysteresis_percent: float = param(
        8.0, "of the total, beyond half a replica: nothing moves for less", at_least=0, at_most=20
    )
    coupled: bool = param(True, "one role cannot serve without the others: all have a replica, or none")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Roles that serve together."""

    roles: tuple[RoleSettings, ...] = param(doc="in the order that decides between equal costs")
    mode: Literal["dry_run", "active", "paused"] = param(
        "dry_run", "dry_run: recommend; active: also act; paused: keep recommending the same"
    )
    tolerance_percent: float = param(
        10.0, "that a metric may be off its target before anything changes", at_least=0, at_most=100
    )
    total: Literal["sum", "joint"] = param(
        "sum", "sum: what the roles ask for, each by its metrics; joint: all roles as one, by the metrics of the pool"
    )
    metrics: tuple[Metric, ...] = param((), "of all roles together, with total: joint")
    behavior: Behavior = field(default_factory=Behavior)
    coordination: CoordinationSettings = field(default_factory=CoordinationSettings)
    cost_expansion_rate_percent: float = param(
        EXPANSION,
        "by which the packages grow that a role gets at a time, where cost decides",
        at_least=0,
        at_most=10000,
    )
    gpu_budget: float | None = param(None, "GPUs of all replicas together; null: any number", more_than=0)
    look_ahead: Duration = param(
        Duration(150.0), "by which sums that grow are carried on: what a pod takes to start", at_most=1800
    )
    gate: bool = param(True, "while replicas start or drain, none moves unless a role asks for more than it gets")
    settle: Duration = param(Duration(30.0), "that the gate stays closed after that: a window of the metrics")
    max_moves: int = param(0, "replicas that change their role in one decision, at most; 0: any number", at_least=0)
    surge: bool = param(
        False, "where the GPU budget has room, a replica that changes its role starts in one before it leaves the other"
    )
    stale_after: Duration = param(Duration(45.0), "from which on a measured value is missing", more_than=0)
    actuator: ActuatorSettings | None = param(None, "who scales, with mode: active")
    drain: DrainSettings = field(default_factory=DrainSettings)

    def affords(self, replicas: Mapping[str, int]) -> bool:
        return self.gpu_budget is None or self.gpus(replicas) <= self.gpu_budget

    def gpus(self, replicas: Mapping[str, int]) -> float:
        return sum(role.gpus * replicas[role.name] for role in self.roles)


@dataclass(frozen=True, slots=True)
class AutoscaleSettings:
    """Recommends how many replicas each role of a pool should have."""

    interval: Duration = param(Duration(15.0), "between two recommendations", more_than=0)
    pools: Mapping[str, PoolSettings] = param({}, "by name")
    prometheus: PrometheusSettings | None = param(None, "who is asked where a source is promql: and a query")


def load(section: Any, path: str = PATH) -> AutoscaleSettings:
    """Raises ConfigError with every fault."""
    found = list(_faults(section, path))
    said = {problem.path for problem in found}
    settings = AutoscaleSettings()
    try:
        settings = params.build(AutoscaleSettings, section, path)
    except Invalid as invalid:
        found[:0] = [problem for problem in invalid.problems if problem.path not in said]
    if found:
        raise ConfigError(found)
    return settings


def _faults(section: Any, path: str) -> Iterator[Problem]:
    """What single values do not show, looked for in what was written: so it is found beside faults of single values."""
    pools = section.get("pools") if isinstance(section, Mapping) else None
    for name, pool in pools.items() if isinstance(pools, Mapping) else ():
        here = join(join(path, "pools"), str(name))
        if isinstance(pool, Mapping):
            yield from _pool_faults(pool, here)
            yield from _query_faults(pool, here, answered=bool(section.get("prometheus")))


def _pool_faults(pool: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    written = pool.get("roles")
    listed = enumerate(written if isinstance(written, list) else ())
    roles = {index: one for index, one in listed if isinstance(one, Mapping)}
    yield from role_faults(written, join(path, "roles"))
    yield from _owner_faults(pool, roles.values(), path)
    names = [str(one.get("name")) for one in roles.values()]
    yield from coordination_faults(pool.get("coordination"), names, join(path, "coordination"), camel)
    if str(pool.get("total", "sum")).lower() == "joint":
        yield from _joint_faults(pool, path)
        return
    for index, role in roles.items():
        here = f"{join(path, 'roles')}[{index}].metrics"
        yield from _metric_faults(role.get("metrics"), here)
        if not role.get("metrics") and role.get("min") != role.get("max"):
            yield Problem(here, "is required where min and max differ")
        if PREFILL_LOAD in _sources(role.get("metrics")).values() and role.get("prefillRate") is None:
            yield Problem(join(f"{join(path, 'roles')}[{index}]", "prefillRate"), f"{PREFILL_LOAD} is reckoned with it")


def _owner_faults(pool: Mapping[Any, Any], roles: Collection[Mapping[Any, Any]], path: str) -> Iterator[Problem]:
    """Two that scale one role would undo each other's work."""
    actuator, here = pool.get("actuator"), join(path, "actuator")
    if not isinstance(actuator, Mapping):
        return
    names = [str(one.get("name")) for one in roles]
    listed, targets = actuator.get("roles"), actuator.get("targets")
    named = [str(one) for one in listed] if isinstance(listed, list) else []
    aimed = [str(one) for one in targets] if isinstance(targets, Mapping) else []
    for key, given in (("roles", named), ("targets", aimed)):
        for name in given:
            if name not in names:
                yield Problem(join(here, key), f"there is no role '{name}'{params.suggestion(name, names)}")
    for name in named:
        if aimed and name not in aimed:
            yield Problem(join(here, "targets"), f"role '{name}' has none")
    for one in roles:
        name = str(one.get("name"))
        if one.get("externallyOwned") is True and name in (named or aimed or names):
            yield Problem(here, f"role '{name}' is externallyOwned: others scale it; leave it out of the actuator")


def _joint_faults(pool: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    here = join(path, "metrics")
    if not pool.get("metrics"):
        yield Problem(here, "is required with total: joint")
    yield from _metric_faults(pool.get("metrics"), here)


def _query_faults(pool: Mapping[Any, Any], path: str, *, answered: bool) -> Iterator[Problem]:
    for where, source in _all_sources(pool, path):
        if source.startswith(PROMQL) and not source.removeprefix(PROMQL).strip():
            yield Problem(where, f"has no query after {PROMQL}")
        elif source.startswith(PROMQL) and not answered:
            yield Problem(where, f"is a query: {PATH}.prometheus must say who is asked")


def _all_sources(pool: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str]]:
    roles, told = pool.get("roles"), pool.get("coordination")
    listed = [(path, pool)] + [(f"{path}.roles[{index}]", one) for index, one in enumerate(_list(roles))]
    for here, one in listed:
        for index, source in _sources(_map(one).get("metrics")).items():
            yield f"{here}.metrics[{index}].source", source
    for role, signals in _map(_map(told).get("signals")).items():
        for name, signal in _map(signals).items():
            yield f"{path}.coordination.signals.{role}.{name}.source", str(_map(signal).get("source", ""))


def _sources(metrics: Any) -> dict[int, str]:
    """By the number of the metric."""
    listed = enumerate(_list(metrics))
    return {at: str(one.get("source") or one.get("name")) for at, one in listed if isinstance(one, Mapping)}


def _list(written: Any) -> list[Any]:
    return written if isinstance(written, list) else []


def _map(written: Any) -> Mapping[Any, Any]:
    return written if isinstance(written, Mapping) else {}


def _metric_faults(metrics: Any, path: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, metric in enumerate(metrics if isinstance(metrics, list) else ()):
        name = metric.get("name") if isinstance(metric, Mapping) else None
        if isinstance(name, str) and name in seen:
            yield Problem(f"{path}[{index}].name", f"'{name}' stands twice")
        elif isinstance(name, str):
            seen.add(name)
