"""Validation of roles and their coordination: single values, and combinations of values. JSON (`preferred_ratio`) and
YAML (`preferredRatio`) are read as written; `spell` returns the key of a field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from proxy.autoscale.policy import ANY_ROLE, SATURATION, Coordination, Role, Signal, mapped, number, reading
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


def names_of(written: Any) -> list[str]:
    """Return the names of all roles, whatever other faults they have."""
    return [str(one.get("name")) for one in listed(written) if isinstance(one, Mapping)]


def listed(written: Any) -> list[Any]:
    return written if isinstance(written, list) else []


def read_roles(written: Any, path: str = "roles") -> tuple[list[Role], list[Problem]]:
    """Return the roles without faults, and the faults."""
    if isinstance(written, str) or not isinstance(written, Sequence) or not written:
        return [], [Problem(path, "must be a list of at least one role")]
    roles: list[Role] = []
    faults: list[Problem] = []
    seen: set[str] = set()
    for index, role in enumerate(written):
        here = f"{path}[{index}]"
        if not isinstance(role, Mapping):
            faults.append(Problem(here, "must be a mapping"))
            continue
        name = role.get("name")
        values, problems = read(
            Role, {"name": "", **{key: role[key] for key in _ROLE if key in role}}, here, wrong=_OF_ROLES
        )
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            problems.append(Problem(join(here, "name"), "must be a non-empty name without surrounding blanks"))
        elif name in seen:
            problems.append(Problem(join(here, "name"), f"'{name}' stands twice"))
        else:
            seen.add(name)
        if values.get("min", 0) > values.get("max", MOST):
            problems.append(Problem(join(here, "min"), "must be <= max"))
        for key in ("min", "max", "current", "ready"):
            if (values.get(key) or 0) > MOST:
                problems.append(Problem(join(here, key), f"must be at most {MOST}"))
        faults += problems
        if not problems:
            roles.append(Role(**values))
    return roles, faults


def read_coordination(
    written: Any, roles: Sequence[str], path: str = "coordination", spell: Spell = as_written
) -> tuple[Coordination, list[Problem]]:
    """Return the coordination and its faults. Unusable values are ignored, and numbers out of bounds are clamped.
    Ratios are kept as written, because they are checked where they are used. `roles` are the allowed names."""
    if not isinstance(written, Mapping):
        return Coordination(), [] if written is None else [Problem(path, "must be a mapping")]
    readers = {spell(name): (name, reader) for name, reader in _READERS.items()}
    single = {key: {} if key in readers else value for key, value in written.items()}
    values, faults = read(Coordination, single, path, wrong=_OF_COORDINATION, spell=spell)
    for field in fields(Coordination):
        low, high, _ = field.metadata["bounds"]
        if low is not None and (found := number(written.get(spell(field.name)))) is not None:
            values[field.name] = min(max(found, low), high)
    for key, (name, reader) in readers.items():
        value, here = written.get(key), join(path, key)
        if value is not None and not isinstance(value, Mapping):
            faults.append(Problem(here, "must be a mapping"))
        values[name], problems = reader(mapped(value), roles, here)
        faults += problems
    values["preferred_ratio"] = written.get(spell("preferred_ratio")) or {}
    return Coordination(**values), faults


Read = tuple[dict[str, Any], list[Problem]]


def _saturation(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Read:
    found = {name: value for name in SATURATION if (value := reading(written.get(name)))}
    faults = [
        Problem(join(path, name), POSITIVE) if name in SATURATION else _no_signal(name, path)
        for name in written
        if name not in found
    ]
    return found, faults


def _signal_weights(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Read:
    found: dict[str, Any] = {}
    faults: list[Problem] = []
    for role, here, weights in _of_roles(written, (*roles, ANY_ROLE), path, faults):
        unknown = [_no_signal(name, here) for name in weights if name not in SATURATION]
        good = {name: value for name, one in weights.items() if (value := reading(one)) is not None}
        wrong = [Problem(join(here, name), FINITE) for name in weights if name in SATURATION and name not in good]
        if any(good.values()):
            found[role] = good
        elif not unknown and not wrong:
            wrong = [Problem(here, "weights must have a positive sum")]
        faults += [*unknown, *wrong]
    return found, faults


def _signals(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Read:
    found: dict[str, Any] = {}
    faults: list[Problem] = []
    for role, here, signals in _of_roles(written, roles, path, faults):
        for name, signal in signals.items():
            at = join(here, str(name))
            if name in SATURATION:
                faults.append(Problem(at, "is there already; its saturation and its weight have keys of their own"))
                continue
            if not isinstance(signal, Mapping):
                faults.append(Problem(at, "must be a mapping"))
                continue
            values, problems = read(Signal, signal, at, wrong=_OF_SIGNALS)
            if not values.get("source", "?").strip():
                problems.append(Problem(join(at, "source"), NO_SOURCE))
            faults += problems
            if "saturation" in values and ("weight" in values or "weight" not in signal):
                found.setdefault(role, {})[name] = Signal(**{"source": "", **values})
    return found, faults


def _ratios(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Read:
    """A wrong ratio counts as 0..100 in the sums."""
    low, high, faults = 0.0, 100.0 * len(roles), list[Problem]()
    for _, here, ratio in _of_roles(written, roles, path, faults, " with min and max"):
        values, problems = read(_Ratio, ratio, here, wrong={"min": PERCENT, "max": PERCENT})
        if len(values) == 2 and values["min"] > values["max"]:
            problems.append(Problem(here, "min must be <= max"))
        faults += problems
        if not problems:
            low, high = low + values["min"], high + values["max"] - 100
    if low > 100:
        faults.append(Problem(path, f"sum of min ratios must not exceed 100 (is {low:g})"))
    if high < 100 and written:
        faults.append(Problem(path, f"sum of max ratios must be at least 100 (is {high:g})"))
    return {}, faults


def _of_roles(
    written: Mapping[Any, Any], roles: Sequence[str], path: str, faults: list[Problem], keys: str = ""
) -> Iterator[tuple[str, str, Mapping[Any, Any]]]:
    """Yield the name, the path and the mapping of each role. Append the faults of the others."""
    for role, of_role in written.items():
        here = join(path, str(role))
        if role not in roles:
            faults.append(Problem(path, f"there is no role '{role}'{suggestion(str(role), list(roles))}"))
        elif not isinstance(of_role, Mapping):
            faults.append(Problem(here, f"must be a mapping{keys}"))
        else:
            yield role, here, of_role


def _no_signal(name: Any, path: str) -> Problem:
    return Problem(path, f"there is no signal '{name}'{suggestion(str(name), list(SATURATION))}")


_READERS = {
    "saturation": _saturation,
    "signal_weights": _signal_weights,
    "signals": _signals,
    "preferred_ratio": _ratios,
}
