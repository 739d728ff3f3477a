"""What another policy would have said to recorded decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from proxy.autoscale.observed import Situation
from proxy.autoscale.readings import number, of_role, reading
from proxy.autoscale.recommender import Recommendation, Recommender
from proxy.autoscale.settings import PoolSettings


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded moment: what was said then, and what would have been said. `at` is seconds since the Unix epoch;
    None where nothing could be seen that the policy needs."""

    at: float
    recorded: Mapping[str, int]
    replayed: Recommendation | None


@dataclass(frozen=True, slots=True)
class Summary:
    """`moves` are replicas that came and went from one decision to the next; `hours` are replica hours and `gpu_hours`
    those of their GPUs, had every decision been followed at once."""

    moves: int
    hours: float
    gpu_hours: float


def replay(decisions: Sequence[Mapping[str, Any]], pool: PoolSettings) -> list[Step]:
    """The policy sees the fleet as it was, at each step, not as its own decisions would have made it: what the metrics
    would have been then, nobody has measured. `decisions` are those of one pool, as the loop keeps them; any that has
    no time is left out."""
    recommender = Recommender(pool)
    timed = [(at, one) for one in decisions if (at := number(one.get("ts"))) is not None]
    return [
        Step(at, _recorded(one), _again(recommender, at, one, pool))
        for at, one in sorted(timed, key=lambda pair: pair[0])
    ]


def summary(pool: PoolSettings, points: Sequence[tuple[float, Mapping[str, int]]]) -> Summary:
    """`points` are moments and what was wanted from then on, until the next."""
    moves, hours, gpu_hours = 0, 0.0, 0.0
    for (at, wanted), (until, after) in pairwise(points):
        moves += sum(abs(after.get(name, count) - count) for name, count in wanted.items())
        hours += sum(wanted.values()) * (until - at) / 3600
        gpus = (role.gpus * wanted.get(role.name, 0) for role in pool.roles)
        gpu_hours += sum(gpus) * (until - at) / 3600
    return Summary(moves, hours, gpu_hours)


def _again(
    recommender: Recommender, at: float, decision: Mapping[str, Any], pool: PoolSettings
) -> Recommendation | None:
    situations = dict(_situations(decision.get("roles"), pool))
    return recommender.recommend(at, situations) if len(situations) == len(pool.roles) else None


def _situations(roles: Any, pool: PoolSettings) -> Iterator[tuple[str, Situation]]:
    for role in pool.roles:
        seen = of_role(roles, role.name)
        current, ready = reading(seen.get("current")), reading(seen.get("ready"))
        if current is not None and ready is not None:
            signals = {
                name: value for name, one in of_role(seen, "signals").items() if (value := reading(one)) is not None
            }
            metrics = dict(of_role(seen, "metrics"))
            draining = int(reading(seen.get("draining")) or 0)
            yield role.name, Situation(int(current), int(ready), draining, metrics, signals)


def _recorded(decision: Mapping[str, Any]) -> dict[str, int]:
    roles = decision.get("roles")
    names = roles if isinstance(roles, Mapping) else ()
    return {name: int(count) for name in names if (count := reading(of_role(roles, name).get("desired"))) is not None}
