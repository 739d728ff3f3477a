"""Evaluation without a running loop: the JSON of `kvlane autoscale eval`, and the replay of recorded decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from proxy.autoscale.distribution import distribute
from proxy.autoscale.policy import EXPANSION, Result, Role, RoleSituation, mapped, number, of_role, reading
from proxy.autoscale.recommender import Recommendation, Recommender
from proxy.autoscale.settings import ScalingPolicy
from proxy.autoscale.validation import names_of, read_coordination, read_roles
from proxy.core import params
from proxy.core.errors import ConfigError, Problem

_KEYS = ("roles", "coordination", "total", "metrics", "panic", "cost_expansion_rate_percent")


def evaluate(written: Any) -> tuple[Result, list[Problem]]:
    """Return the distribution of a total, and the faults that were ignored: of bands, weights, numbers. Raise
    ConfigError with all faults if the roles or the total cannot be used."""
    if not isinstance(written, Mapping):
        raise ConfigError([Problem("", "must be an object with roles and total")])
    total, names = written.get("total"), names_of(written.get("roles"))
    roles, fatal = read_roles(written.get("roles"))
    coordination, faults = read_coordination(written.get("coordination"), names)
    if not isinstance(total, int) or isinstance(total, bool):
        raise ConfigError([*fatal, Problem("total", "must be an integer"), *faults])
    if fatal:
        raise ConfigError([*fatal, *faults])
    known = [item.name for item in dataclasses.fields(Role)]
    unknown = [*_unknown(written, _KEYS, "")]
    for index, role in enumerate(written["roles"]):
        unknown += _unknown(role, known, f"roles[{index}]")
    metrics, expansion = written.get("metrics"), reading(written.get("cost_expansion_rate_percent"))
    for name in mapped(metrics):
        if name not in names:
            faults.append(Problem("metrics", f"there is no role '{name}'{params.suggestion(str(name), names)}"))
    expansion, panic = EXPANSION if expansion is None else expansion, written.get("panic") is True
    return distribute(roles, coordination, total, metrics, panic, expansion), [*unknown, *faults]


def result(found: Result) -> dict[str, Any]:
    reasons = [reason.value for reason in found.reasons]
    return {**dataclasses.asdict(found), "reasons": reasons, "realized_share": found.realized_share}


def _unknown(written: Mapping[str, Any], known: Sequence[str], path: str) -> Iterator[Problem]:
    for key in written:
        if key not in known:
            yield Problem(path, params.unknown(str(key), known))


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
    """Return the steps of a replay. At each step the policy sees the recorded fleet, not the fleet of its own
    decisions, whose metrics were not measured. `decisions` are the decisions of one pool, as the loop stores them;
    decisions without a time are left out."""
    recommender = Recommender(pool)
    timed = [(at, one) for one in decisions if (at := number(one.get("ts"))) is not None]
    steps = []
    for at, one in sorted(timed, key=lambda pair: pair[0]):
        situations = dict(_situations(one.get("roles"), pool))
        replayed = recommender.recommend(at, situations) if len(situations) == len(pool.roles) else None
        steps.append(EvaluationStep(at, _recorded(one), replayed))
    return steps


def summary(pool: ScalingPolicy, points: Sequence[tuple[float, Mapping[str, int]]]) -> Summary:
    """Return the totals. `points` are moments and the replicas wanted from then until the next moment."""
    moves, hours, gpu_hours = 0, 0.0, 0.0
    for (at, wanted), (until, after) in pairwise(points):
        moves += sum(abs(after.get(name, count) - count) for name, count in wanted.items())
        hours += sum(wanted.values()) * (until - at) / 3600
        gpu_hours += pool.gpus(wanted) * (until - at) / 3600
    return Summary(moves, hours, gpu_hours)


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
    roles = mapped(decision.get("roles"))
    return {name: int(count) for name in roles if (count := reading(of_role(roles, name).get("desired"))) is not None}
