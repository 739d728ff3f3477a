"""The difference of two configurations, and the part of it that needs a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from proxy.core.params import camel, join, yaml_key
from proxy.settings import DERIVED, PoolSettings, Settings

T = TypeVar("T")

FIXED = (
    "listen",
    "admin.host",
    "admin.port",
    "admin.tls",
    "extproc",
    "replicas",
    "security.cors",
    "telemetry.logFormat",
    "telemetry.accessLog",
    "telemetry.record",
    "telemetry.tracing",
)
"""Paths of settings that need a restart of the process."""

OF_THE_HOST = ("listen.host", "listen.port", "admin.host", "admin.port", "admin.tls", "extproc", "replicas")
"""Paths of settings that need a restart of the supervisor too."""


def changed(before: Settings, after: Settings) -> list[str]:
    """Return the paths of all values that differ."""
    sections = [item.name for item in dataclasses.fields(Settings) if item.name not in DERIVED]
    found: list[str] = []
    for name in sections:
        found.extend(_between(getattr(before, name), getattr(after, name), camel(name)))
    found.extend(_between(before.source.get("scheduling") or {}, after.source.get("scheduling") or {}, "scheduling"))
    for name in {**before.pools, **after.pools}:
        found.extend(_of_a_pool(before.pools.get(name), after.pools.get(name), f"pools.{name}"))
    kept = [[name for name in one.pools if name in other.pools] for one, other in ((before, after), (after, before))]
    return [*found, *(["pools"] if kept[0] != kept[1] else [])]


def servable(before: Settings, wanted: Settings, fixed: Sequence[str] = FIXED) -> tuple[Settings, list[str]]:
    """Return the wanted settings as far as a running process can adopt them, and the paths of the rest."""
    left = [path for path in changed(before, wanted) if any(_is_in(path, other) for other in fixed)]
    for path in fixed:
        wanted = _with(wanted, before, path.split("."))
    return wanted, left


def _of_a_pool(before: PoolSettings | None, after: PoolSettings | None, path: str) -> Iterator[str]:
    if before is None or after is None:
        yield path
        return
    for section in ("pods", "flow_control", "disaggregation"):
        yield from _between(getattr(before, section), getattr(after, section), join(path, camel(section)))
    was, wanted = (pool.given.get("scheduling") or {} for pool in (before, after))
    yield from _between(was, wanted, join(path, "scheduling"))


def _between(before: Any, after: Any, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(before) and type(before) is type(after):
        for item in dataclasses.fields(before):
            yield from _between(getattr(before, item.name), getattr(after, item.name), join(path, yaml_key(item)))
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            yield from _between(before.get(key), after.get(key), join(path, str(key)))
    elif before != after:
        yield path


def _is_in(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".")


def _with(wanted: T, before: T, path: list[str]) -> T:
    """Return the settings with the value of `before` at this path."""
    name = next(item.name for item in dataclasses.fields(wanted) if yaml_key(item) == path[0])  # type: ignore[arg-type]
    own, other = getattr(wanted, name), getattr(before, name)
    return dataclasses.replace(wanted, **{name: other if len(path) == 1 else _with(own, other, path[1:])})  # type: ignore[type-var]
