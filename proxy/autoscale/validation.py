"""Validation of roles and their coordination: single values, and combinations of values. JSON (`preferred_ratio`) and
YAML (`preferredRatio`) are read as written; `spell` returns the key of a field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from proxy.autoscale.policy import ANY_ROLE, SATURATION, Coordination, Role, Signal, reading
from proxy.core.errors import Problem
from proxy.core.params import join, param, read, suggestion

MOST = 1_000_000
"""Largest number of replicas of a role."""

Spell = Callable[[str], str]

COUNT, FINITE, POSITIVE, NO_SOURCE, FRACTION, PERCENT, SWITCH = (
    "must be an integer >= 0",
    "must be a finite number >= 0",
    "must be > 0",
    "must say where it is read",
    "must be between 0 and 1",
    "must be between 0 and 100",
    "must be true or false",
)
_OF_ROLES = {"min": COUNT, "max": "must be an integer >= 1", "current": COUNT, "ready": COUNT}
_OF_ROLES |= dict.fromkeys(("cost", "weight", "demand"), FINITE)
_OF_COORDINATION = {
    "mode": "must be Off or Preferred",
    "baseline": "must be cost, current, weights or demand",
    "normalization": "must be absolute or relative",
    "weight_by": "must be none or ready",
    "combine": "must be mean or max",
    "alpha": FRACTION,
    "pressure_floor": FRACTION,
    "hysteresis_percent": "must be between 0 and 20",
    "panic_hold": SWITCH,
    "coupled": SWITCH,
}
_OF_SIGNALS = {"source": NO_SOURCE, "saturation": POSITIVE, "weight": FINITE}
_ROLE = [field.name for field in fields(Role)]


@dataclass(frozen=True, slots=True)
class _Ratio:
    min: float = param(at_least=0, at_most=100)
    max: float = param(at_least=0, at_most=100)


def as_written(key: str) -> str:
    return key


def role_faults(written: Any, path: str = "roles") -> Iterator[Problem]:
    if isinstance(written, str) or not isinstance(written, Sequence) or not written:
        yield Problem(path, "must be a list of at least one role")
        return
    seen: set[str] = set()
    for index, role in enumerate(written):
        here = f"{path}[{index}]"
        if not isinstance(role, Mapping):
            yield Problem(here, "must be a mapping")
            continue
        name = role.get("name")
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            yield Problem(join(here, "name"), "must be a non-empty name without surrounding blanks")
        elif name in seen:
            yield Problem(join(here, "name"), f"'{name}' stands twice")
        else:
            seen.add(name)
        values, problems = read(
            Role, {"name": "", **{key: role[key] for key in _ROLE if key in role}}, here, wrong=_OF_ROLES
        )
        yield from problems
        if values.get("min", 0) > values.get("max", MOST):
            yield Problem(join(here, "min"), "must be <= max")
        for key in ("min", "max", "current", "ready"):
            if (values.get(key) or 0) > MOST:
                yield Problem(join(here, key), f"must be at most {MOST}")


def coordination_faults(
    written: Any, roles: Sequence[str], path: str = "coordination", spell: Spell = as_written
) -> Iterator[Problem]:
    """Yield the faults of a coordination. `roles` are the allowed names."""
    if written is None:
        return
    if not isinstance(written, Mapping):
        yield Problem(path, "must be a mapping")
        return
    mappings = {spell(name): faults for name, faults in _MAPPINGS.items()}
    single = {key: {} if key in mappings else value for key, value in written.items()}
    yield from read(Coordination, single, path, wrong=_OF_COORDINATION, spell=spell)[1]
    for key, faults in mappings.items():
        value, here = written.get(key), join(path, key)
        if value is not None and not isinstance(value, Mapping):
            yield Problem(here, "must be a mapping")
        elif value:
            yield from faults(value, roles, here)


def _saturation_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    for name, value in written.items():
        if name not in SATURATION:
            yield _no_signal(name, path)
        elif not reading(value):
            yield Problem(join(path, name), POSITIVE)


def _weight_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    for here, weights in _of_roles(written, (*roles, ANY_ROLE), path):
        if isinstance(weights, Problem):
            yield weights
            continue
        unknown = [name for name in weights if name not in SATURATION]
        wrong = [name for name in weights if name in SATURATION and reading(weights[name]) is None]
        yield from (_no_signal(name, here) for name in unknown)
        yield from (Problem(join(here, name), FINITE) for name in wrong)
        if not unknown and not wrong and not any(weights.values()):
            yield Problem(here, "weights must have a positive sum")


def _signal_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    for here, signals in _of_roles(written, roles, path):
        if isinstance(signals, Problem):
            yield signals
            continue
        for name, signal in signals.items():
            at = join(here, str(name))
            if name in SATURATION:
                yield Problem(at, "is there already; its saturation and its weight have keys of their own")
            elif not isinstance(signal, Mapping):
                yield Problem(at, "must be a mapping")
            else:
                values, problems = read(Signal, signal, at, wrong=_OF_SIGNALS)
                yield from problems
                if not values.get("source", "?").strip():
                    yield Problem(join(at, "source"), NO_SOURCE)


def _ratio_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    """A wrong ratio counts as 0..100 in the sums."""
    low, high = 0.0, 100.0 * len(roles)
    for here, ratio in _of_roles(written, roles, path, " with min and max"):
        if isinstance(ratio, Problem):
            yield ratio
            continue
        values, problems = read(_Ratio, ratio, here, wrong={"min": PERCENT, "max": PERCENT})
        if len(values) == 2 and values["min"] > values["max"]:
            problems.append(Problem(here, "min must be <= max"))
        yield from problems
        if not problems:
            low, high = low + values["min"], high + values["max"] - 100
    if low > 100:
        yield Problem(path, f"sum of min ratios must not exceed 100 (is {low:g})")
    if high < 100:
        yield Problem(path, f"sum of max ratios must be at least 100 (is {high:g})")


def _of_roles(
    written: Mapping[Any, Any], roles: Sequence[str], path: str, keys: str = ""
) -> Iterator[tuple[str, Mapping[Any, Any] | Problem]]:
    """Yield the path and the mapping of each role, or a fault."""
    for role, of_role in written.items():
        here = join(path, str(role))
        if role not in roles:
            yield here, Problem(path, f"there is no role '{role}'{suggestion(str(role), list(roles))}")
        elif not isinstance(of_role, Mapping):
            yield here, Problem(here, f"must be a mapping{keys}")
        else:
            yield here, of_role


def _no_signal(name: Any, path: str) -> Problem:
    return Problem(path, f"there is no signal '{name}'{suggestion(str(name), list(SATURATION))}")


_MAPPINGS = {
    "saturation": _saturation_faults,
    "signal_weights": _weight_faults,
    "signals": _signal_faults,
    "preferred_ratio": _ratio_faults,
}
