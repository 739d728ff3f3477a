"""The plugin reference, read off the classes."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from proxy.core import params
from proxy.core.params import Duration, Size, plain, yaml_key
from proxy.core.plugin import Plugin, points_of
from proxy.core.registry import Registry, parameters_of
from proxy.scheduling.build import PORTS

REQUIRED = "required"

_WORDS: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    Duration: "duration",
    Size: "size",
    Any: "anything",
}


@dataclass(frozen=True, slots=True)
class ParameterReference:
    """`name` is dotted for what is nested; `default` is as YAML would have it, `required` where there is none."""

    name: str
    type: str
    default: Any
    doc: str


@dataclass(frozen=True, slots=True)
class PluginReference:
    type: str
    points: tuple[str, ...]
    doc: str
    parameters: tuple[ParameterReference, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "extensionPoints": list(self.points),
            "doc": self.doc,
            "parameters": [dataclasses.asdict(parameter) for parameter in self.parameters],
        }


def references(registry: Registry) -> list[PluginReference]:
    """Of every plugin type there is, by name."""
    return [reference(cls) for cls in registry]


def reference(cls: type[Plugin]) -> PluginReference:
    fields = parameters_of(cls, dict.fromkeys(PORTS))
    parameters = tuple(parameter for field in fields for parameter in _parameters(cls, field, ""))
    return PluginReference(cls.plugin_type, tuple(point.__name__ for point in points_of(cls)), _doc(cls), parameters)


def markdown(plugins: list[PluginReference]) -> str:
    """The page docs/plugins.md, by extension point."""
    lines = ["# Plugins", "", "Written by `kvlane plugins --markdown` from the classes themselves.", ""]
    for point in dict.fromkeys(plugin.points[0] for plugin in plugins):
        lines += [f"## {point}", ""]
        for plugin in plugins:
            if plugin.points[0] == point:
                lines += _section(plugin)
    return "\n".join(lines)


def spell(value: Any) -> str:
    """A default as one would write it in YAML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "empty"
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else str(value)


def _section(plugin: PluginReference) -> list[str]:
    also = f"Also: {', '.join(plugin.points[1:])}. " if len(plugin.points) > 1 else ""
    lines = [f"### {plugin.type}", "", also + plugin.doc, ""]
    if plugin.parameters:
        lines += ["| parameter | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(parameter) for parameter in plugin.parameters]
        lines.append("")
    return lines


def _row(parameter: ParameterReference) -> str:
    cells = (f"`{parameter.name}`", parameter.type, spell(parameter.default), parameter.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _parameters(owner: type, field: dataclasses.Field[Any], path: str) -> Iterator[ParameterReference]:
    kind = params.hints(owner)[field.name]
    name = params.join(path, yaml_key(field))
    nested, below = _nested(kind, name)
    default = REQUIRED if _is_required(field) else plain(_default(field))
    default = {} if nested is not None and isinstance(default, dict) else default
    yield ParameterReference(name, _spell_type(kind), default, field.metadata.get("doc", ""))
    if nested is not None:
        for inner in dataclasses.fields(nested):
            yield from _parameters(nested, inner, below)


def _nested(kind: Any, path: str) -> tuple[Any, str]:
    """The dataclass inside an annotation, and the path of its fields."""
    kind = _without_none(kind)
    if dataclasses.is_dataclass(kind):
        return kind, path
    if get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0]):
        return get_args(kind)[0], f"{path}[]"
    return None, path


def _spell_type(kind: Any) -> str:
    kind = _without_none(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    origin = get_origin(kind)
    if origin is Literal:
        return " | ".join(map(str, get_args(kind)))
    if origin is tuple:
        return f"list of {_spell_type(get_args(kind)[0])}"
    if dataclasses.is_dataclass(kind) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "mapping"
    return getattr(kind, "__name__", str(kind))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _doc(cls: type) -> str:
    """The first paragraph, on one line."""
    first, _, _ = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    return " ".join(first.split())
