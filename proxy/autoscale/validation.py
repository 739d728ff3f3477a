"""Everything that is wrong with roles and their coordination, each fault with its path, before anything uses them.

Both JSON (`preferred_ratio`) and YAML (`preferredRatio`) are looked at as they were written; `spell` says how keys are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from proxy.autoscale.policy import ANY_ROLE, SATURATION, number
from proxy.core.errors import Problem
from proxy.core.params import join, suggestion

MOST = 1_000_000
"""Replicas of a role."""

Spell = Callable[[str], str]

_CHOICES = {
    "mode": ("Off", "Preferred"),
    "baseline": ("cost", "current", "weights", "demand"),
    "normalization": ("absolute", "relative"),
    "weight_by": ("none", "ready"),
    "combine": ("mean", "max"),
}
_RANGES = {"alpha": (0, 1), "pressure_floor": (0, 1), "hysteresis_percent": (0, 20)}
_SWITCHES = ("panic_hold", "coupled")
_KNOWN = (*_CHOICES, *_RANGES, *_SWITCHES, "preferred_ratio", "saturation", "signal_weights", "signals")


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
        yield from _name_faults(role.get("name"), here, seen)
        yield from _bound_faults(role, here)
        for key in ("cost", "weight"):
            if not _is_number(role.get(key, 1.0), 0):
                yield Problem(join(here, key), "must be a finite number >= 0")
        if role.get("demand") is not None and not _is_number(role["demand"], 0):
            yield Problem(join(here, "demand"), "must be a finite number >= 0")
        for key in ("current", "ready"):
            if role.get(key) is not None and not _is_count(role[key], 0):
                yield Problem(join(here, key), "must be an integer >= 0")
        for key in ("min", "max", "current", "ready"):
            if _is_count(role.get(key), MOST + 1):
                yield Problem(join(here, key), f"must be at most {MOST}")


def coordination_faults(
    written: Any, roles: Sequence[str], path: str = "coordination", spell: Spell = as_written
) -> Iterator[Problem]:
    """`roles` are the names that may be used."""
    if written is None:
        return
    if not isinstance(written, Mapping):
        yield Problem(path, "must be a mapping")
        return
    known = [spell(key) for key in _KNOWN]
    for key in written:
        if key not in known:
            yield Problem(path, f"unknown field '{key}'{suggestion(str(key), known)}")
    yield from _value_faults(written, path, spell)
    for key, faults in (
        ("saturation", _saturation_faults),
        ("signal_weights", _weight_faults),
        ("signals", _signal_faults),
        ("preferred_ratio", _band_faults),
    ):
        value, here = written.get(spell(key)), join(path, spell(key))
        if value is not None and not isinstance(value, Mapping):
            yield Problem(here, "must be a mapping")
        elif value:
            yield from faults(value, roles, here)


def _name_faults(name: Any, path: str, seen: set[str]) -> Iterator[Problem]:
    if not isinstance(name, str) or not name.strip() or name != name.strip():
        yield Problem(join(path, "name"), "must be a non-empty name without surrounding blanks")
    elif name in seen:
        yield Problem(join(path, "name"), f"'{name}' stands twice")
    else:
        seen.add(name)


def _bound_faults(role: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    low, high = role.get("min"), role.get("max")
    if not _is_count(low, 0):
        yield Problem(join(path, "min"), "must be an integer >= 0")
    if not _is_count(high, 1):
        yield Problem(join(path, "max"), "must be an integer >= 1")
    if _is_count(low, 0) and _is_count(high, 1) and low > high:  # type: ignore[operator]
        yield Problem(join(path, "min"), "must be <= max")


def _value_faults(written: Mapping[Any, Any], path: str, spell: Spell) -> Iterator[Problem]:
    for key, choices in _CHOICES.items():
        value = written.get(spell(key), choices[0])
        if key == "mode" and value is False:
            continue
        if str(value).lower() not in (choice.lower() for choice in choices):
            yield Problem(join(path, spell(key)), f"must be {', '.join(choices[:-1])} or {choices[-1]}")
    for key, (low, high) in _RANGES.items():
        if not _is_number(written.get(spell(key), low), low, high):
            yield Problem(join(path, spell(key)), f"must be between {low} and {high}")
    for key in _SWITCHES:
        if not isinstance(written.get(spell(key), False), bool):
            yield Problem(join(path, spell(key)), "must be true or false")


def _saturation_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    for name, value in written.items():
        if name not in SATURATION:
            yield Problem(path, f"there is no signal '{name}'{suggestion(str(name), list(SATURATION))}")
        elif not (_is_number(value, 0) and value > 0):
            yield Problem(join(path, name), "must be > 0")


def _weight_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    for role, weights in written.items():
        here = join(path, str(role))
        if role not in (*roles, ANY_ROLE):
            yield _no_role(role, (*roles, ANY_ROLE), path)
        elif not isinstance(weights, Mapping):
            yield Problem(here, "must be a mapping")
        else:
            unknown = [name for name in weights if name not in SATURATION]
            wrong = [name for name in weights if name in SATURATION and not _is_number(weights[name], 0)]
            for name in unknown:
                yield Problem(here, f"there is no signal '{name}'{suggestion(str(name), list(SATURATION))}")
            for name in wrong:
                yield Problem(join(here, name), "must be a finite number >= 0")
            if not unknown and not wrong and not any(weights.values()):
                yield Problem(here, "weights must have a positive sum")


def _signal_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    for role, signals in written.items():
        here = join(path, str(role))
        if role not in roles:
            yield _no_role(role, roles, path)
        elif not isinstance(signals, Mapping):
            yield Problem(here, "must be a mapping")
        else:
            for name, signal in signals.items():
                yield from _one_signal_faults(str(name), signal, join(here, str(name)))


def _one_signal_faults(name: str, signal: Any, path: str) -> Iterator[Problem]:
    if name in SATURATION:
        yield Problem(path, "is there already; its saturation and its weight have keys of their own")
    elif not isinstance(signal, Mapping):
        yield Problem(path, "must be a mapping")
    else:
        if not isinstance(signal.get("source"), str) or not signal["source"].strip():
            yield Problem(join(path, "source"), "must say where it is read")
        saturation = number(signal.get("saturation"))
        if saturation is None or saturation <= 0:
            yield Problem(join(path, "saturation"), "must be > 0")
        if not _is_number(signal.get("weight", 1.0), 0):
            yield Problem(join(path, "weight"), "must be a finite number >= 0")


def _band_faults(written: Mapping[Any, Any], roles: Sequence[str], path: str) -> Iterator[Problem]:
    """What is at fault counts as 0..100 in the sums."""
    low, high = 0.0, 100.0 * len(roles)
    for role, band in written.items():
        here = join(path, str(role))
        if role not in roles:
            yield _no_role(role, roles, path)
        elif not isinstance(band, Mapping):
            yield Problem(here, "must be a mapping with min and max")
        else:
            faults = list(_one_band_faults(band, here))
            yield from faults
            if not faults:
                low, high = low + band["min"], high + band["max"] - 100
    if low > 100:
        yield Problem(path, f"sum of min ratios must not exceed 100 (is {low:g})")
    if high < 100:
        yield Problem(path, f"sum of max ratios must be at least 100 (is {high:g})")


def _one_band_faults(band: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    wrong = [key for key in ("min", "max") if not _is_number(band.get(key), 0, 100)]
    for key in wrong:
        yield Problem(join(path, key), "must be between 0 and 100")
    for key in band:
        if key not in ("min", "max"):
            yield Problem(path, f"unknown field '{key}'{suggestion(str(key), ['min', 'max'])}")
    if not wrong and band["min"] > band["max"]:
        yield Problem(path, "min must be <= max")


def _no_role(role: Any, known: Sequence[str], path: str) -> Problem:
    return Problem(path, f"there is no role '{role}'{suggestion(str(role), list(known))}")


def _is_count(value: Any, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_number(value: Any, at_least: float, at_most: float = math.inf) -> bool:
    found = number(value)
    return found is not None and at_least <= found <= at_most
