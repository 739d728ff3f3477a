"""Evaluation without a running loop: the JSON of `kvlane autoscale eval`, and the replay of recorded decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from proxy.autoscale.distribution import distribute
from proxy.autoscale.policy import (
    EXPANSION,
    SATURATION,
    Coordination,
    Result,
    Role,
    RoleSituation,
    Signal,
    number,
    of_role,
    reading,
)
from proxy.autoscale.recommender import Recommendation, Recommender
from proxy.autoscale.settings import ScalingPolicy
from proxy.autoscale.validation import as_written, coordination_faults, role_faults
from proxy.core import params
from proxy.core.errors import ConfigError, Problem

_KEYS = ("roles", "coordination", "total", "metrics", "panic", "cost_expansion_rate_percent")


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of `distribute`. `overlooked` are faults that are ignored: of bands, weights, numbers."""

    roles: tuple[Role, ...]
    coordination: Coordination
    total: int
    metrics: Any
    panic: bool
    expansion: float
    overlooked: tuple[Problem, ...]

    def evaluate(self) -> Result:
        return distribute(self.roles, self.coordination, self.total, self.metrics, self.panic, self.expansion)


def question(written: Any) -> Question:
    """Raise ConfigError with all faults if the roles or the total cannot be used."""
    if not isinstance(written, Mapping):
        raise ConfigError([Problem("", "must be an object with roles and total")])
    fatal, total = list(role_faults(written.get("roles"))), written.get("total")
    if not isinstance(total, int) or isinstance(total, bool):
        fatal.append(Problem("total", "must be an integer"))
    if fatal:
        raise ConfigError([*fatal, *coordination_faults(written.get("coordination"), _names(written))])
    roles = tuple(_role(one) for one in written["roles"])
    expansion = reading(written.get("cost_expansion_rate_percent"))
    return Question(
        roles=roles,
        coordination=coordination(written.get("coordination")),
        total=written["total"],
        metrics=written.get("metrics"),
        panic=written.get("panic") is True,
        expansion=EXPANSION if expansion is None else expansion,
        overlooked=tuple(_overlooked(written, [role.name for role in roles])),
    )


def coordination(written: Any) -> Coordination:
    """Read a coordination. Unusable values are ignored, and numbers out of bounds are clamped. Ratios are checked where
    they are used."""
    if not isinstance(written, Mapping):
        return Coordination()
    values, _ = params.read(Coordination, {**written, **{name: {} for name in _READERS}}, "", spell=as_written)
    for item in dataclasses.fields(Coordination):
        low, high, _ = item.metadata["bounds"]
        if low is not None and (found := number(written.get(item.name))) is not None:
            values[item.name] = min(max(found, low), high)
    return Coordination(**values | {name: read(written.get(name)) for name, read in _READERS.items()})


def result(found: Result) -> dict[str, Any]:
    """Return the result ready for JSON."""
    return {
        "replicas": dict(found.replicas),
        "total": found.total,
        "applied": found.applied,
        "reasons": [reason.value for reason in found.reasons],
        "band_satisfied": found.band_satisfied,
        "baseline_share": dict(found.baseline_share),
        "pressure": dict(found.pressure),
        "pressure_share": dict(found.pressure_share),
        "blended_share": dict(found.blended_share),
        "target": dict(found.target),
        "realized_share": found.realized_share,
    }


def _names(written: Mapping[str, Any]) -> list[str]:
    """Return the names of all roles with a name, whatever other faults they have."""
    listed = written.get("roles")
    return [str(one.get("name")) for one in (listed if isinstance(listed, list) else ()) if isinstance(one, Mapping)]


def _overlooked(written: Mapping[str, Any], roles: Sequence[str]) -> Iterator[Problem]:
    yield from _unknown(written, _KEYS, "")
    for index, role in enumerate(written["roles"]):
        yield from _unknown(role, [item.name for item in dataclasses.fields(Role)], f"roles[{index}]")
    yield from coordination_faults(written.get("coordination"), roles)
    metrics = written.get("metrics")
    for name in metrics if isinstance(metrics, Mapping) else ():
        if name not in roles:
            yield Problem("metrics", f"there is no role '{name}'{params.suggestion(str(name), list(roles))}")


def _unknown(written: Mapping[str, Any], known: Sequence[str], path: str) -> Iterator[Problem]:
    for key in written:
        if key not in known:
            yield Problem(path, params.unknown(str(key), known))


def _role(written: Mapping[str, Any]) -> Role:
    return Role(**params.read(Role, written, "")[0])


def _saturation(written: Any) -> dict[str, float]:
    return {name: found for name, found in _numbers(written).items() if found > 0 and name in SATURATION}


def _signal_weights(written: Any) -> dict[str, dict[str, float]]:
    given = written if isinstance(written, Mapping) else {}
    weights = {role: _numbers(one) for role, one in given.items()}
    return {role: one for role, one in weights.items() if any(one.values())}


def _signals(written: Any) -> dict[str, dict[str, Signal]]:
    given = written if isinstance(written, Mapping) else {}
    return {
        role: {name: signal for name, one in signals.items() if (signal := _signal(one)) is not None}
        for role, signals in given.items()
        if isinstance(signals, Mapping)
    }


def _signal(written: Any) -> Signal | None:
    given = written if isinstance(written, Mapping) else {}
    saturation, weight = reading(given.get("saturation")), reading(given.get("weight", 1.0))
    if not saturation or weight is None:
        return None
    return Signal(str(given.get("source", "")), saturation, weight)


def _numbers(written: Any) -> dict[str, float]:
    given = written if isinstance(written, Mapping) else {}
    return {name: found for name, value in given.items() if (found := reading(value)) is not None}


_READERS = {
    "preferred_ratio": lambda written: written if written is not None else {},
    "saturation": _saturation,
    "signal_weights": _signal_weights,
    "signals": _signals,
}


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """One recorded moment: the decision then, and the decision of the policy; None if metrics were missing. `at` is
    seconds since the Unix epoch."""

    at: float
    recorded: Mapping[str, int]
    replayed: Recommendation | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a replay. `moves` are replicas that were added or removed from one decision to the next; `hours` are
    replica hours and `gpu_hours` GPU hours, if every decision had been applied at once."""

    moves: int
    hours: float
    gpu_hours: float


def replay(decisions: Sequence[Mapping[str, Any]], pool: ScalingPolicy) -> list[EvaluationStep]:
    """Yield the steps of a replay. At each step the policy sees the recorded fleet, not the fleet of its own decisions,
    whose metrics were not measured. `decisions` are the decisions of one pool, as the loop stores them; decisions
    without a time are left out."""
    recommender = Recommender(pool)
    timed = [(at, one) for one in decisions if (at := number(one.get("ts"))) is not None]
    return [
        EvaluationStep(at, _recorded(one), _again(recommender, at, one, pool))
        for at, one in sorted(timed, key=lambda pair: pair[0])
    ]


def summary(pool: ScalingPolicy, points: Sequence[tuple[float, Mapping[str, int]]]) -> Summary:
    """Return the totals. `points` are moments and the replicas wanted from then until the next moment."""
    moves, hours, gpu_hours = 0, 0.0, 0.0
    for (at, wanted), (until, after) in pairwise(points):
        moves += sum(abs(after.get(name, count) - count) for name, count in wanted.items())
        hours += sum(wanted.values()) * (until - at) / 3600
        gpus = (role.gpus * wanted.get(role.name, 0) for role in pool.roles)
        gpu_hours += sum(gpus) * (until - at) / 3600
    return Summary(moves, hours, gpu_hours)


def _again(
    recommender: Recommender, at: float, decision: Mapping[str, Any], pool: ScalingPolicy
) -> Recommendation | None:
    situations = dict(_situations(decision.get("roles"), pool))
    return recommender.recommend(at, situations) if len(situations) == len(pool.roles) else None


def _situations(roles: Any, pool: ScalingPolicy) -> Iterator[tuple[str, RoleSituation]]:
    for role in pool.roles:
        seen = of_role(roles, role.name)
        current, ready = reading(seen.get("current")), reading(seen.get("ready"))
        if current is not None and ready is not None:
            signals = {
                name: value for name, one in of_role(seen, "signals").items() if (value := reading(one)) is not None
            }
            metrics = dict(of_role(seen, "metrics"))
            draining = int(reading(seen.get("draining")) or 0)
            yield role.name, RoleSituation(int(current), int(ready), draining, metrics, signals)


def _recorded(decision: Mapping[str, Any]) -> dict[str, int]:
    roles = decision.get("roles")
    names = roles if isinstance(roles, Mapping) else ()
    return {name: int(count) for name in names if (count := reading(of_role(roles, name).get("desired"))) is not None}
