"""The settings reference, read off the dataclasses: the page docs/configuration.md."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal, Union, cast, get_args, get_origin

from proxy.core import params
from proxy.core.params import yaml_key
from proxy.core.units import Duration, Moment, Size
from proxy.settings import DERIVED, Settings

_HEAD = """\
# Settings

Written by `kvlane check --reference` from the classes themselves. Every key is optional unless it says `required`.
Durations are written `250ms`, `15s`, `5m`, `1h30m`, sizes `64MiB`, `10Gi`, `1k`; `${NAME}` and `${NAME:-default}` in a
value stand for environment variables, `$$` for a dollar. `scheduling` takes the schema of an `EndpointPickerConfig`:
see [the plugins](plugins.md)."""

_POOLS = [
    "",
    "## pools",
    "",
    "Name -> a pool of pods beside that of the top level, which is called `default`. Each has sections of its own:",
    "",
    "| key | type | default | meaning |",
    "|---|---|---|---|",
    "| `pods` | mapping | | as `pods` at the top level |",
    "| `scheduling` | mapping | | as `scheduling` at the top level |",
    "| `flowControl` | mapping | | as `flowControl` at the top level; all caps are of the pool |",
    "| `disaggregation` | mapping | | as `disaggregation` at the top level, which says what is not said here |",
]

_TYPES: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    Duration: "duration",
    Size: "size",
    Moment: "date or time",
}
_DURATIONS = ((3600, "h"), (60, "m"), (1, "s"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def markdown() -> str:
    kinds = params.hints(Settings)
    lines = [_HEAD]
    for item in dataclasses.fields(Settings):
        if item.name not in DERIVED:
            lines += _section(yaml_key(item), kinds[item.name])
    lines += _POOLS
    lines += [""]
    return "\n".join(lines)


def _section(name: str, cls: type[Any]) -> list[str]:
    lines = ["", f"## {name}", ""]
    if (doc := inspect.cleandoc(cls.__doc__ or "")) and not doc.startswith(f"{cls.__name__}("):
        lines += [" ".join(doc.partition("\n\n")[0].split()), ""]
    return [*lines, "| key | type | default | meaning |", "|---|---|---|---|", *_rows(cls, "")]


def _rows(cls: type[Any], path: str) -> Iterator[str]:
    """One per value; what is nested has a dotted key, what is in a list has `[]` in it."""
    for item in dataclasses.fields(cls):
        kind, key = _without_none(params.hints(cls)[item.name]), params.join(path, yaml_key(item))
        if not dataclasses.is_dataclass(kind) or item.default is None:
            doc = item.metadata.get("doc", "") + _bounds(item)
            yield "| " + " | ".join((f"`{key}`", _type(kind), _default(kind, item), doc.replace("|", "\\|"))) + " |"
        if get_origin(kind) is tuple:
            kind, key = get_args(kind)[0], f"{key}[]"
        if dataclasses.is_dataclass(kind):
            yield from _rows(cast("type[Any]", kind), key)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    if get_origin(kind) is tuple:
        return f"list of {_type(get_args(kind)[0])}s"
    return _TYPES.get(kind, "mapping")


def _default(kind: Any, item: dataclasses.Field[Any]) -> str:
    if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
        return "required"
    value: Any = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    if kind is Duration and value:
        return f"`{_duration(value)}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in (None, "", (), {}):
        return ""
    return f"`{_size(value)}`" if kind is Size else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _bounds(item: dataclasses.Field[Any]) -> str:
    words = zip(("at least", "at most", "more than"), item.metadata.get("bounds", ()), strict=False)
    said = [f"{word} {bound:g}" for word, bound in words if bound is not None]
    return f" ({', '.join(said)})" if said else ""


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    size, unit = next((size, unit) for size, unit in _DURATIONS if seconds % size == 0 or unit == "s")
    return f"{seconds / size:g}{unit}"


def _size(count: int) -> str:
    return next((f"{count // size}{unit}" for size, unit in _SIZES if count and count % size == 0), str(count))
