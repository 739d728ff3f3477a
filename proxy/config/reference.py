"""The reference of settings and plugins, read from their classes."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from proxy.core import params
from proxy.core.params import Duration, Moment, Size, plain, yaml_key
from proxy.core.plugin import Plugin, points_of
from proxy.core.registry import Registry, parameters_of
from proxy.core.request import DataKey
from proxy.scheduling.build import PORTS
from proxy.scheduling.sections import SECTION_TYPES
from proxy.settings import DERIVED, Settings

REQUIRED = "required"

_TYPES: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    Duration: "duration",
    Size: "size",
    Moment: "date or time",
    Any: "anything",
}
_DURATIONS = ((3600, "h"), (60, "m"), (1, "s"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

_SETTINGS = """\
# Settings

Written by `kvlane check --reference` from the classes themselves. Every key is optional unless it says `required`.
Durations are written `250ms`, `15s`, `5m`, `1h30m`, `7d`, sizes `64MiB`, `10Gi`, `1k`; a number without a unit is in
seconds or bytes. In a key, `[]` stands for an item of a list, and `NAME` for a name that you choose. In a value,
`${NAME}` and `${NAME:-default}` stand for environment variables, `$$` for a dollar. `scheduling` takes the schema of an
`EndpointPickerConfig`: see [the plugins](plugins.md)."""

_POOLS = """
## pools

Name -> a pool of pods beside that of the top level, which is called `default`. Each has sections of its own:

| key | type | default | meaning |
|---|---|---|---|
| `pods` | mapping | | as `pods` at the top level |
| `scheduling` | mapping | | as `scheduling` at the top level |
| `flowControl` | mapping | | as `flowControl` at the top level; all caps are of the pool |
| `disaggregation` | mapping | | as `disaggregation` at the top level, which says what is not given here |
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`name` is dotted for nested values; `default` is as in YAML, `shown` as on a page. A section has no value."""

    name: str
    type: str
    default: Any
    doc: str
    bounds: str
    shown: str
    is_section: bool


@dataclass(frozen=True, slots=True)
class PluginReference:
    type: str
    points: tuple[str, ...]
    doc: str
    parameters: tuple[Parameter, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "extensionPoints": list(self.points),
            "doc": self.doc,
            "parameters": [
                {"name": one.name, "type": one.type, "default": one.default, "doc": one.doc} for one in self.parameters
            ],
        }


def reference(cls: type[Plugin]) -> PluginReference:
    parameters = _parameters(cls, parameters_of(cls, dict.fromkeys(PORTS)))
    return PluginReference(
        cls.plugin_type, tuple(point.__name__ for point in points_of(cls)), _doc(cls), tuple(parameters)
    )


def section_reference(type_name: str) -> PluginReference:
    """Return the description of a plugin type of llm-d whose parameters become settings. Raise KeyError."""
    section = SECTION_TYPES[type_name]
    doc = f"Accepted in an EndpointPickerConfig, where its parameters become settings. {section.remark}".rstrip()
    return PluginReference(type_name, (section.role,), doc, tuple(_parameters(section.parameters)))


def plugins_page(plugins: list[PluginReference]) -> str:
    """Return docs/plugins.md, by extension point."""
    lines = ["# Plugins", "", "Written by `kvlane plugins --markdown` from the classes themselves.", ""]
    for point in dict.fromkeys(plugin.points[0] for plugin in plugins):
        lines += [f"## {point}", ""]
        for plugin in plugins:
            if plugin.points[0] == point:
                also = f"Also: {', '.join(plugin.points[1:])}. " if len(plugin.points) > 1 else ""
                lines += [f"### {plugin.type}", "", also + plugin.doc, ""]
                lines += [*_table("parameter", plugin.parameters), ""] if plugin.parameters else []
    return "\n".join(lines)


def settings_page() -> str:
    """Return docs/configuration.md."""
    kinds, lines = params.hints(Settings), [_SETTINGS]
    for item in dataclasses.fields(Settings):
        if item.name not in DERIVED:
            cls = kinds[item.name]
            lines += ["", f"## {yaml_key(item)}", "", *([doc, ""] if (doc := _doc(cls)) else [])]
            lines += _table("key", (one for one in _parameters(cls) if not one.is_section))
    return "\n".join([*lines, _POOLS])


def spell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "empty"
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else str(value)


def _parameters(
    cls: type[Any], fields: Iterable[dataclasses.Field[Any]] | None = None, path: str = ""
) -> Iterator[Parameter]:
    """Yield the values of a class: nested ones have a dotted key, with `[]` for an item of a list and `NAME` for a key
    of a mapping."""
    for item in params.in_order(dataclasses.fields(cls) if fields is None else fields):
        kind, name = _without_none(params.hints(cls)[item.name]), params.join(path, yaml_key(item))
        inner, below = _inner(kind, name)
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        is_section = dataclasses.is_dataclass(kind) and default is not None
        default = plain(default) if isinstance(default, DataKey) else default
        shown, written = _shown(kind, default), REQUIRED if default is dataclasses.MISSING else plain(default)
        if dataclasses.is_dataclass(default):
            shown, written = "", {}
        words = zip(("at least", "at most", "more than"), item.metadata.get("bounds", ()), strict=False)
        limits = [f"{word} {bound:g}" for word, bound in words if bound is not None]
        doc, bounds = item.metadata.get("doc", ""), f" ({', '.join(limits)})" if limits else ""
        yield Parameter(name, _type(kind), written, doc, bounds, shown, is_section)
        if dataclasses.is_dataclass(inner):
            yield from _parameters(inner, None, below)  # type: ignore[arg-type]


def _inner(kind: Any, name: str) -> tuple[Any, str]:
    """Return the type and the key of an item of a list or a mapping; other kinds unchanged."""
    if get_origin(kind) is tuple:
        return get_args(kind)[0], f"{name}[]"
    if isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping):
        return get_args(kind)[-1], f"{name}.NAME"
    return kind, name


def _table(title: str, parameters: Iterable[Parameter]) -> Iterator[str]:
    yield f"| {title} | type | default | meaning |"
    yield "|---|---|---|---|"
    for one in parameters:
        kind, choices = one.type, one.type.removeprefix("list of ")
        if " | " in choices:
            kind = kind.replace(choices, ", ".join(f"`{choice}`" for choice in choices.split(" | ")))
        doc = (one.doc + one.bounds).replace("|", "\\|")
        yield f"| `{one.name}` | {kind} | {one.shown} | {doc} |"


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _type(kind: Any) -> str:
    kind = _without_none(kind)
    if get_origin(kind) is Literal:
        return " | ".join(str(one) for one in get_args(kind) if not isinstance(one, bool))  # YAML reads `off` as False
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind)
    if get_origin(kind) in (tuple, frozenset):
        inner = _type(get_args(kind)[0])
        return f"list of {inner}" if " | " in inner else f"list of {inner}s"
    return _TYPES.get(kind, "mapping")


def _shown(kind: Any, value: Any) -> str:
    if value is dataclasses.MISSING:
        return REQUIRED
    if kind is Duration and value:
        return f"`{_in_units(kind, value)}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in (None, "", (), {}, frozenset()):
        return ""
    if isinstance(value, tuple | frozenset):
        return ", ".join(f"`{one}`" for one in plain(value))
    return f"`{_in_units(kind, value) if kind is Size else spell(plain(value))}`"


def _in_units(kind: Any, value: float) -> str:
    """Return a Duration or a Size as YAML has it, in the largest unit that gives a whole number."""
    if kind is Size:
        return next((f"{value // size}{unit}" for size, unit in _SIZES if value and value % size == 0), str(value))
    units = ((size, unit) for size, unit in _DURATIONS if value >= size and (value % size == 0 or size <= 1))
    size, unit = next(units, (0.001, "ms"))
    return f"{value / size:.12g}{unit}" if value else "0s"


def with_units(effective: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """Return the effective values of a configuration, or of a pool, with durations and sizes in units."""
    plugins = [
        {**one, "parameters": _with_units(one["parameters"], registry.get(one["type"]))}
        for one in effective["scheduling"]["plugins"]
    ]
    changed: dict[str, Any] = {"scheduling": {**effective["scheduling"], "plugins": plugins}}
    if "pools" in effective:
        changed["pools"] = {name: with_units(pool, registry) for name, pool in effective["pools"].items()}
    return {**_with_units(effective, Settings), **changed}


def _with_units(value: Any, kind: Any) -> Any:
    """Return a plain value of this type, or a value with its origin, in units."""
    kind = _without_none(kind)
    if isinstance(value, Mapping):
        if value.keys() == {"value", "origin"}:
            return {**value, "value": _with_units(value["value"], kind)}
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        kinds = {yaml_key(item): params.hints(kind)[item.name] for item in fields}
        others = next(reversed(get_args(kind)), None)
        return {key: _with_units(item, kinds.get(key, others)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_units(item, next(iter(get_args(kind)), None)) for item in value]
    if kind not in (Duration, Size) or not isinstance(value, int | float):
        return value
    text = _in_units(kind, value)
    return f"{text}B" if text.isdecimal() and value else text


def _doc(cls: type) -> str:
    """Return the first paragraph of the docstring on one line; empty for the docstring of a dataclass."""
    first, _, _ = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    return "" if first.startswith(f"{cls.__name__}(") else " ".join(first.split())
