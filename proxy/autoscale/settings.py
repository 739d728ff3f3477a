"""The `autoscale` section: roles, what they are sized by, and how fast and how they may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from proxy.autoscale.behavior import Behavior
from proxy.autoscale.demand import Metric
from proxy.autoscale.policy import EXPANSION, PREFILL_LOAD, TTFT, Baseline, Coordination, Role, mapped
from proxy.autoscale.validation import listed, names_of, read_coordination, read_roles
from proxy.core import params
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Duration, Invalid, camel, join, param
from proxy.kubernetes.settings import SERVICE_ACCOUNT, ApiServer

_NEEDS = {"webhook": ("url",), "exec": ("command",), "kubernetes": ("targets",), "compose": ("targets",)}
_TAKES = {
    "webhook": ("url", "secret"),
    "exec": ("command",),
    "kubernetes": ("targets", "namespace", "url", "token_file", "ca_file"),
    "compose": ("targets", "project", "directory"),
}
_OWN = ("url", "secret", "command", "targets", "namespace", "token_file", "ca_file", "project", "directory")
"""Fields that apply only to some types."""

_BUILT_IN = {
    "deployment": "apps/v1/deployments",
    "statefulset": "apps/v1/statefulsets",
    "replicaset": "apps/v1/replicasets",
}


@dataclass(frozen=True, slots=True)
class ActuatorSettings:
    """The actuator, which scales roles if `mode` is active."""

    type: Literal["webhook", "exec", "kubernetes", "compose"] = param(doc="kind of actuator")
    roles: tuple[str, ...] = param((), "roles to scale; default: the roles in `targets`, or all")
    url: str = param("", "webhook: URL to send to; kubernetes: URL of the API server, default: that of the own cluster")
    secret: str | None = param(None, "webhook: key of the signature")
    command: tuple[str, ...] = param(
        (), "exec: program and arguments; {pool} {role} {desired} {current} {victims} are replaced"
    )
    targets: Mapping[str, str] = param(
        {},
        "role -> object to scale; kubernetes: deployment/NAME, statefulset/NAME or "
        "GROUP/VERSION/RESOURCE/NAME; compose: service",
    )
    namespace: str = param("", "kubernetes: namespace of the targets; default: that of kvlane's own pod")
    token_file: str = param("", "kubernetes: file with the token; default: that of the service account")
    ca_file: str = param("", "kubernetes: file of the certificate authorities; default: that of the service account")
    project: str = param("", "compose: name of the project")
    directory: str = param("", "compose: directory of the compose file")
    up_interval: Duration = param(Duration(30.0), "shortest time between two increases of a role")
    down_interval: Duration = param(Duration(300.0), "shortest time between two decreases of a role")
    max_step: int = param(8, "largest number of replicas by which a role changes at once; 0: no limit", at_least=0)
    timeout: Duration = param(Duration(10.0), "timeout of one call of the actuator", more_than=0)
    startup: Duration = param(Duration(600.0), "time in which requested replicas must appear", more_than=0)
    allow_zero: bool = param(False, "allow a role with min: 0 to lose its last replica")
    kill_file: str | None = param(None, "file whose existence stops all scaling")

    def __post_init__(self) -> None:
        """Raises ValueError for what the type lacks, or has no use for."""
        for name in _NEEDS[self.type]:
            if not getattr(self, name):
                raise ValueError(f"type {self.type} needs {camel(name)}")
        for name in _OWN:
            if getattr(self, name) and name not in _TAKES[self.type]:
                raise ValueError(f"{camel(name)} means nothing to type {self.type}")
        if self.type == "kubernetes":
            _ = self.access
            for target in self.targets.values():
                path_of(target)

    @property
    def access(self) -> ApiServer:
        """Return the API server with the service account of the pod. Raise ValueError for a wrong `url`."""
        token, authority = str(SERVICE_ACCOUNT / "token"), str(SERVICE_ACCOUNT / "ca.crt")
        return ApiServer(self.url, self.namespace, self.token_file or token, self.ca_file or authority)

    @property
    def removes_highest(self) -> bool:
        """Whether the platform always removes the pods with the highest numbers."""
        if self.type == "kubernetes":
            return any(path_of(target)[0] == _BUILT_IN["statefulset"] for target in self.targets.values())
        return self.type == "compose"

    def owned(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """Which of all roles it scales."""
        return self.roles or tuple(self.targets) or roles


def path_of(target: str) -> tuple[str, str]:
    """Return the API group with the resource, and the name, of a target of Kubernetes. Raise ValueError."""
    kind, _, name = target.rpartition("/")
    group = _BUILT_IN.get(kind.lower(), kind)
    if not name or group.count("/") != 2:
        raise ValueError(f"{target!r} is no target; write deployment/NAME or GROUP/VERSION/RESOURCE/NAME")
    return group, name


DrainPolicy = Literal["least-loss", "highest-ordinal", "newest"]


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """Draining of pods before their removal: a pod gets no new requests, and is removed when its last request has
    ended."""

    policy: DrainPolicy = param(
        "least-loss",
        "which pods are removed first; set highest-ordinal for StatefulSets and compose, which always remove the "
        "highest number",
    )
    timeout: Mapping[str, Duration] = param(
        {}, "role -> longest wait for the last request; default: 300s for prefill, 900s for other roles"
    )

    group_label: str = param(
        "modelserving.volcano.sh/group-name",
        "label with the group of roles that a pod belongs to; least-loss keeps the last pod of each role in a"
        " group as long as possible",
    )

    def patience(self, role: str) -> float:
        return self.timeout.get(role, Duration(300.0 if role == "prefill" else 900.0))


PROMQL = "promql:"
"""Prefix of a source that is a query."""


@dataclass(frozen=True, slots=True)
class PrometheusSettings:
    """The Prometheus server for metrics and signals whose source is a query."""

    url: str = param(doc="URL of Prometheus or of a compatible server, with the path before /api/v1")
    token: str | None = param(None, "bearer token")
    token_file: str = param("", "file with a bearer token, read for each query")
    ca_file: str = param("", "file of the certificate authorities of the server; default: the system's")

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} is no URL of a Prometheus; write http://host:9090")
        if self.token is not None and self.token_file:
            raise ValueError("token and tokenFile exclude each other")


PATH = "autoscale"


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """One role of a pool."""

    name: str = param(doc="name of the role in metrics, responses and preferred ratios")
    min: int = param(doc="smallest number of replicas", at_least=0)
    max: int = param(doc="largest number of replicas", at_least=1)
    selector: Mapping[str, str] = param(
        {}, "labels of the role's pods; default: pods with the role of this name, or all pods if the pool has one role"
    )
    cost: float = param(1.0, "cost of a replica, relative to the other roles", at_least=0)
    weight: float = param(1.0, "share of the total, with baseline: weights", at_least=0)
    gpus: float = param(1.0, "GPUs of a replica", at_least=0)
    metrics: tuple[Metric, ...] = param((), "scaling metrics; the one that requires the most replicas decides")
    prefill_rate: float | None = param(
        None, "uncached prompt tokens that a replica computes per second; null: learnt from latencies", more_than=0
    )
    externally_owned: bool = param(False, "another controller, such as an HPA or KEDA, applies the recommendation")

    def sized(self, current: int | None, ready: int | None) -> Role:
        return Role(self.name, self.min, self.max, self.cost, self.weight, current, ready)


@dataclass(frozen=True, slots=True)
class CoordinationSettings(Coordination):
    """How the total is divided among the roles."""

    alpha: float = param(0.25, "weight of the pressure against the baseline", at_least=0, at_most=1)
    baseline: Baseline = param(
        "demand", "shares of the roles without pressure; with total: joint, demand is the same as current"
    )
    hysteresis_percent: float = param(
        8.0,
        "smallest change, as a percentage of the total and at least half a replica, for which replicas move "
        "between roles",
        at_least=0,
        at_most=20,
    )
    coupled: bool = param(True, "no role can serve without the others: all roles have replicas, or none has")


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """The roles of a pool and how they are scaled."""

    roles: tuple[RoleSettings, ...] = param(doc="roles; between equal costs the earlier one gets the replica")
    mode: Literal["dry_run", "active", "paused"] = param(
        "dry_run", "dry_run: recommend only; active: scale; paused: repeat the last recommendation"
    )
    tolerance_percent: float = param(
        10.0, "deviation of a metric from its target that causes no change", at_least=0, at_most=100
    )
    total: Literal["sum", "joint"] = param(
        "sum",
        "sum: the sum of what the metrics of each role require; joint: what the metrics of the whole pool require",
    )
    metrics: tuple[Metric, ...] = param((), "scaling metrics of all roles together, with total: joint")
    behavior: Behavior = field(default_factory=Behavior)
    coordination: CoordinationSettings = field(default_factory=CoordinationSettings)
    cost_expansion_rate_percent: float = param(
        EXPANSION,
        "growth of the packages of replicas that a role gets at once, where cost decides",
        at_least=0,
        at_most=10000,
    )
    gpu_budget: float | None = param(None, "largest number of GPUs of all replicas; null: no limit", more_than=0)
    look_ahead: Duration = param(
        Duration(150.0), "time by which growing sums are extrapolated: the time that a pod takes to start", at_most=1800
    )
    gate: bool = param(
        True, "while replicas start or drain, move none between roles unless a role needs more than it has"
    )
    settle: Duration = param(
        Duration(30.0), "time for which the gate stays closed afterwards: the window of the metrics"
    )
    max_moves: int = param(
        0, "largest number of replicas that change their role in one decision; 0: no limit", at_least=0
    )
    surge: bool = param(
        False, "if the GPU budget permits it, start a replica in its new role before it leaves the old one"
    )
    stale_after: Duration = param(Duration(45.0), "age at which a measured value counts as missing", more_than=0)
    actuator: ActuatorSettings | None = param(None, "actuator for mode: active")
    drain: DrainSettings = field(default_factory=DrainSettings)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Return the smallest and largest number of replicas by role."""
        return {role.name: (role.min, role.max) for role in self.roles}

    def metrics_of(self, role: RoleSettings) -> tuple[Metric, ...]:
        """Return the metrics that size the role, or all roles together."""
        return self.metrics if self.total == "joint" else role.metrics

    def affords(self, replicas: Mapping[str, int]) -> bool:
        return self.gpu_budget is None or self.gpus(replicas) <= self.gpu_budget

    def gpus(self, replicas: Mapping[str, int]) -> float:
        return sum(role.gpus * replicas.get(role.name, 0) for role in self.roles)


@dataclass(frozen=True, slots=True)
class AutoscaleSettings:
    """Recommendations of how many replicas each role of a pool should have."""

    interval: Duration = param(Duration(15.0), "time between two recommendations", more_than=0)
    pools: Mapping[str, ScalingPolicy] = param({}, "scaling policies by name of the pool")
    prometheus: PrometheusSettings | None = param(None, "Prometheus server for sources of the form promql: QUERY")


def load(section: Any, path: str = PATH) -> AutoscaleSettings:
    """Return the settings. Raise ConfigError with every fault."""
    found = list(_faults(section, path))
    paths = {problem.path for problem in found}
    settings = AutoscaleSettings()
    try:
        settings = params.build(AutoscaleSettings, section, path)
    except Invalid as invalid:
        found[:0] = [problem for problem in invalid.problems if problem.path not in paths]
    if found:
        raise ConfigError(found)
    return settings


def _faults(section: Any, path: str) -> Iterator[Problem]:
    """Return faults of combinations of values. They are found in the unparsed data, so that they are reported beside
    faults of single values."""
    for name, pool in mapped(mapped(section).get("pools")).items():
        here = join(join(path, "pools"), str(name))
        if isinstance(pool, Mapping):
            yield from _pool_faults(pool, here)
            yield from _query_faults(pool, here, has_server=bool(section.get("prometheus")))


def _pool_faults(pool: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    written = pool.get("roles")
    yield from read_roles(written, join(path, "roles"))[1]
    yield from _owner_faults(pool, path)
    yield from read_coordination(pool.get("coordination"), names_of(written), join(path, "coordination"), camel)[1]
    if str(pool.get("total", "sum")).lower() == "joint":
        here = join(path, "metrics")
        if not pool.get("metrics"):
            yield Problem(here, "is required with total: joint")
        yield from _metric_faults(pool.get("metrics"), here)
        return
    for at, role in enumerate(listed(written)):
        if not isinstance(role, Mapping):
            continue
        here = f"{path}.roles[{at}].metrics"
        yield from _metric_faults(role.get("metrics"), here)
        if not role.get("metrics") and role.get("min") != role.get("max"):
            yield Problem(here, "is required where min and max differ")
        if PREFILL_LOAD in _sources(role.get("metrics")).values() and role.get("prefillRate") is None:
            yield Problem(f"{path}.roles[{at}].prefillRate", f"{PREFILL_LOAD} is reckoned with it")


def _owner_faults(pool: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    """Return faults of roles with two scalers, which would undo each other's actions."""
    actuator, here, names = pool.get("actuator"), join(path, "actuator"), names_of(pool.get("roles"))
    if not isinstance(actuator, Mapping):
        return
    named = [str(one) for one in listed(actuator.get("roles"))]
    aimed = [str(one) for one in mapped(actuator.get("targets"))]
    for key, given in (("roles", named), ("targets", aimed)):
        for name in given:
            if name not in names:
                yield Problem(join(here, key), f"there is no role '{name}'{params.suggestion(name, names)}")
    for name in named:
        if aimed and name not in aimed:
            yield Problem(join(here, "targets"), f"role '{name}' has none")
    for one in map(mapped, listed(pool.get("roles"))):
        if one.get("externallyOwned") is True and str(one.get("name")) in (named or aimed or names):
            fault = f"role '{one.get('name')}' is externallyOwned: others scale it; leave it out of the actuator"
            yield Problem(here, fault)


def _query_faults(pool: Mapping[Any, Any], path: str, *, has_server: bool) -> Iterator[Problem]:
    for where, source in _all_sources(pool, path):
        if source.startswith(PROMQL) and not source.removeprefix(PROMQL).strip():
            yield Problem(where, f"has no query after {PROMQL}")
        elif source.startswith(PROMQL) and not has_server:
            yield Problem(where, f"is a query: {PATH}.prometheus must say who is asked")


def _all_sources(pool: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str]]:
    roles = [(f"{path}.roles[{index}]", one) for index, one in enumerate(listed(pool.get("roles")))]
    for here, one in [(path, pool), *roles]:
        for index, source in _sources(mapped(one).get("metrics")).items():
            yield f"{here}.metrics[{index}].source", source
    for role, signals in mapped(mapped(pool.get("coordination")).get("signals")).items():
        for name, signal in mapped(signals).items():
            yield f"{path}.coordination.signals.{role}.{name}.source", str(mapped(signal).get("source", ""))


def _sources(metrics: Any) -> dict[int, str]:
    """Return the sources by the number of the metric."""
    known = enumerate(listed(metrics))
    return {at: str(one.get("source") or one.get("name")) for at, one in known if isinstance(one, Mapping)}


def _metric_faults(metrics: Any, path: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, metric in enumerate(listed(metrics)):
        name = mapped(metric).get("name")
        if isinstance(name, str) and name in seen:
            yield Problem(f"{path}[{index}].name", f"'{name}' stands twice")
        elif isinstance(name, str):
            seen.add(name)


_TOTALS = 5000
"""Number of totals that are tried before a band counts as impossible."""


def warnings(settings: AutoscaleSettings, path: str = PATH) -> Iterator[Problem]:
    if not settings.pools:
        yield Problem(join(path, "pools"), "has none: nothing is recommended")
    for name, pool in settings.pools.items():
        here = join(join(path, "pools"), name)
        yield from _of_roles(pool, here)
        yield from _of_coordination(pool, join(here, "coordination"))
        yield from _of_acting(pool, here)
        yield from _of_behavior(pool.behavior, join(here, "behavior"))
        if pool.stale_after < settings.interval:
            yield Problem(
                join(here, "staleAfter"), "is shorter than the interval: values are missing that were just read"
            )


def _of_roles(pool: ScalingPolicy, path: str) -> Iterator[Problem]:
    for index, role in enumerate(pool.roles):
        if "." in role.name:
            yield Problem(f"{path}.roles[{index}].name", "has a dot, which paths into the response use as a separator")
    least, most = (pool.gpus({name: each[at] for name, each in pool.bounds.items()}) for at in (0, 1))
    budget = pool.gpu_budget
    if budget is not None and least > budget:
        yield Problem(join(path, "gpuBudget"), f"is less than what the minima take ({least:g}): the minima win")
    elif budget is not None and most > budget:
        yield Problem(join(path, "gpuBudget"), f"is less than what the maxima take ({most:g}): they are out of reach")


def _of_acting(pool: ScalingPolicy, path: str) -> Iterator[Problem]:
    if pool.mode == "active" and pool.actuator is None:
        yield Problem(join(path, "mode"), "active has no effect without an actuator: others read what is recommended")
    if pool.actuator is not None and pool.actuator.removes_highest and pool.drain.policy != "highest-ordinal":
        yield Problem(
            join(path, "drain.policy"),
            f"{pool.drain.policy} may drain other pods than StatefulSets and compose remove: set highest-ordinal",
        )
    for index, role in enumerate(pool.roles):
        if any((one.source or one.name) == TTFT for one in role.metrics):
            here = f"{path}.roles[{index}].metrics"
            yield Problem(here, f"{TTFT} is not known without traffic, and then the role does not shrink")


def _of_coordination(pool: ScalingPolicy, path: str) -> Iterator[Problem]:
    chosen = pool.coordination
    if chosen.mode != "preferred":
        if chosen.preferred_ratio:
            yield Problem(join(path, "preferredRatio"), "has no effect with coordination.mode: off")
        if chosen.signals:
            yield Problem(join(path, "signals"), "has no effect with coordination.mode: off")
        return
    if len(pool.roles) == 1:
        yield Problem(path, "has no effect on one role")
        return
    for role in pool.roles:
        if not chosen.looked_at(role.name):
            yield Problem(path, f"role '{role.name}' has no signal that counts: its share is that of the baseline")
    if chosen.preferred_ratio and not _within_reach(pool):
        yield Problem(
            join(path, "preferredRatio"), "cannot be kept with any total: the roles' min and max are in the way"
        )


def _of_behavior(behavior: Behavior, path: str) -> Iterator[Problem]:
    down, up = behavior.scale_down, behavior.scale_up
    if down.select == "or" and down.percent >= 100:
        yield Problem(join(path, "scaleDown"), "limits nothing: 100 percent may go, or so many instances; select: and")
    if up.stabilization > 0 and behavior.panic.hold > 0:
        yield Problem(join(path, "scaleUp.stabilization"), "does not hold in panic")


def _within_reach(pool: ScalingPolicy) -> bool:
    from proxy.autoscale.distribution import are_hindered, bounded, read_bands  # only if a pool has preferred ratios

    roles = bounded([role.sized(None, None) for role in pool.roles], pool.coordination, 1)
    bands, _ = read_bands(pool.coordination.preferred_ratio, roles)
    least, most = max(sum(role.min for role in roles), 1), sum(role.max for role in roles)
    return any(not are_hindered(bands, roles, total) for total in range(least, min(most, least + _TOTALS) + 1))
