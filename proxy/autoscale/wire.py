"""The JSON of `kvlane autoscale eval`: a question, read so that only its roles and total can be at fault; a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from proxy.autoscale import validation
from proxy.autoscale.cost import EXPANSION
from proxy.autoscale.policy import SATURATION, Coordination, Result, Role, Signal
from proxy.autoscale.readings import number, reading
from proxy.autoscale.recommend import distribute
from proxy.core import params
from proxy.core.errors import ConfigError, Problem

_KEYS = ("roles", "coordination", "total", "metrics", "panic", "cost_expansion_rate_percent")


@dataclass(frozen=True, slots=True)
class Question:
    """What `distribute` is asked. `overlooked` are faults that it can do without: of bands, weights, numbers."""

    roles: tuple[Role, ...]
    coordination: Coordination
    total: int
    metrics: Any
    panic: bool
    expansion: float
    overlooked: tuple[Problem, ...]

    def answer(self) -> Result:
        return distribute(self.roles, self.coordination, self.total, self.metrics, self.panic, self.expansion)


def question(written: Any) -> Question:
    """Raises ConfigError where there is no answer, roles or a total that are none; then with all other faults, too."""
    if not isinstance(written, Mapping):
        raise ConfigError([Problem("", "must be an object with roles and total")])
    fatal = [*validation.role_faults(written.get("roles")), *_total_faults(written)]
    if fatal:
        raise ConfigError([*fatal, *validation.coordination_faults(written.get("coordination"), _names(written))])
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
    """What cannot be used is as if it were not there; bands are looked at when they are used."""
    if not isinstance(written, Mapping):
        return Coordination()
    values: dict[str, Any] = {}
    kinds = params.hints(Coordination)
    for item in dataclasses.fields(Coordination):
        value = written.get(item.name)
        if item.name in _READERS:
            values[item.name] = _READERS[item.name](value)
        elif kinds[item.name] is bool:
            values[item.name] = value if isinstance(value, bool) else item.default
        elif kinds[item.name] is float:
            values[item.name] = _bounded(item, value)
        else:
            values[item.name] = _chosen(kinds[item.name], value, item.default)
    return Coordination(**values)


def result(found: Result) -> dict[str, Any]:
    """In JSON."""
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


def _total_faults(written: Mapping[str, Any]) -> list[Problem]:
    total = written.get("total")
    is_number = isinstance(total, int) and not isinstance(total, bool)
    return [] if is_number else [Problem("total", "must be an integer")]


def _names(written: Mapping[str, Any]) -> list[str]:
    """Of the roles that have one, whatever else is wrong with them."""
    listed = written.get("roles")
    return [str(one.get("name")) for one in (listed if isinstance(listed, list) else ()) if isinstance(one, Mapping)]


def _overlooked(written: Mapping[str, Any], roles: Sequence[str]) -> Iterator[Problem]:
    yield from _unknown(written, _KEYS, "")
    for index, role in enumerate(written["roles"]):
        yield from _unknown(role, [item.name for item in dataclasses.fields(Role)], f"roles[{index}]")
    yield from validation.coordination_faults(written.get("coordination"), roles)
    metrics = written.get("metrics")
    for name in metrics if isinstance(metrics, Mapping) else ():
        if name not in roles:
            yield Problem("metrics", f"there is no role '{name}'{params.suggestion(str(name), list(roles))}")


def _unknown(written: Mapping[str, Any], known: Sequence[str], path: str) -> Iterator[Problem]:
    for key in written:
        if key not in known:
            yield Problem(path, f"unknown field '{key}'{params.suggestion(str(key), known)}")


def _role(written: Mapping[str, Any]) -> Role:
    names = {item.name for item in dataclasses.fields(Role)}
    return Role(**{key: value for key, value in written.items() if key in names})


def _bounded(item: dataclasses.Field[Any], value: Any) -> float:
    low, high, _ = item.metadata["bounds"]
    found = number(value)
    default: Any = item.default
    return float(default if found is None else min(max(found, low), high))


def _chosen(kind: Any, value: Any, default: Any) -> Any:
    return next((choice for choice in get_args(kind) if str(choice).lower() == str(value).lower()), default)


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
