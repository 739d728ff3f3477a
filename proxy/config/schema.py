"""The JSON Schema of the configuration."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from proxy.core import params
from proxy.core.params import Duration, Moment, Size, plain, yaml_key
from proxy.core.registry import Registry, parameters_of
from proxy.disagg.settings import DisaggregationSettings
from proxy.fleet.settings import PodSources
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.scheduling.build import PORTS
from proxy.scheduling.document import API_VERSIONS, FEATURE_GATES, KIND, PluginRef
from proxy.scheduling.sections import (
    SECTION_TYPES,
    DataLayerSection,
    FlowControlSection,
    Ref,
    RequestHandlerSection,
)
from proxy.settings import DERIVED, Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_ENVIRONMENT: Schema = {"type": "string", "pattern": r"\$\{"}
"""Pattern of an environment variable, which may replace a value that is not text."""
_UNIT = r"[0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h|d)"
_SCALARS: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": -params.LARGEST, "maximum": params.LARGEST},
    float: {"type": "number"},
    str: {"type": ["string", "number"]},
    Duration: {"type": ["string", "number"], "pattern": rf"^({_UNIT})+$|\$\{{"},
    Size: {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?\s*([kKMGTP]|[KMGTP]i)?B?$|\$\{"},
    Moment: {"type": "string"},
}
_SELF_CONTAINED = (str, Duration, Size, Moment)
"""Types whose patterns allow variables themselves."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum")


def schema(registry: Registry) -> Schema:
    """Return the schema of kvlane's own file; `#/$defs/scheduling` is the schema of the section `scheduling` alone."""
    return _Writer(registry).root()


class _Writer:
    """The writer of the schema. Every class is written once, under `$defs`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names: dict[type[Any], str] = {}
        self._defs: dict[str, Schema] = {}

    def root(self) -> Schema:
        self._defs["scheduling"] = self._scheduling()
        own = [item for item in dataclasses.fields(Settings) if item.name not in DERIVED]
        kinds = params.hints(Settings)
        properties = {yaml_key(item): self._of(kinds[item.name]) for item in own}
        properties["scheduling"] = _or_null({"$ref": "#/$defs/scheduling"})
        pool = {
            "pods": self._of(PodSources),
            "flowControl": self._of(FlowControlSettings),
            "disaggregation": self._of(DisaggregationSettings),
            "scheduling": properties["scheduling"],
        }
        properties["pools"] = _or_null({"type": "object", "additionalProperties": _or_null(_closed(pool))})
        root = {"$schema": DIALECT, "title": "kvlane", **_closed(properties)}
        return {**root, "$defs": dict(sorted(self._defs.items()))}

    def _scheduling(self) -> Schema:
        ref = _closed({"name": {"type": "string"}, "shadow": self._of(bool), "shadow-profile": self._of(bool)})
        ref["properties"]["plugins"] = {"type": ["array", "null"], "items": self._of(PluginRef)}
        profile = {**ref, "required": ["name"]}
        gates = f"^({'|'.join(FEATURE_GATES)})(=(true|false))?$"
        return _closed(
            {
                "file": {"type": "string", "description": "an EndpointPickerConfig, in place of all other keys"},
                "apiVersion": {"enum": list(API_VERSIONS)},
                "kind": {"const": KIND},
                "featureGates": {"type": ["array", "null"], "items": {"type": "string", "pattern": gates}},
                "plugins": {"type": ["array", "null"], "items": self._plugin()},
                "schedulingProfiles": {"type": ["array", "null"], "items": profile},
                "dataLayer": self._of(DataLayerSection),
                "flowControl": self._of(FlowControlSection),
                "requestHandler": self._of(RequestHandlerSection),
                "parser": self._of(Ref),
                "saturationDetector": {},
            }
        )

    def _plugin(self) -> Schema:
        """Return the schema of a plugin entry: its type determines its parameters."""
        kinds: dict[str, Schema] = {}
        for cls in self._registry:
            fields = parameters_of(cls, dict.fromkeys(PORTS))
            name = f"plugin-{cls.plugin_type}"
            self._defs[name] = self._object(cls, fields)
            kinds[cls.plugin_type] = _or_null({"$ref": f"#/$defs/{name}"})
        kinds.update({name: self._of(kind.parameters) for name, kind in SECTION_TYPES.items()})
        entry = _closed({"type": {"enum": sorted(kinds)}, "name": {"type": "string"}, "parameters": {}})
        chosen = [
            {
                "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
                "then": {"properties": {"parameters": parameters}},
            }
            for name, parameters in sorted(kinds.items())
        ]
        return {**entry, "required": ["type"], "allOf": chosen}

    def _of(self, kind: Any) -> Schema:
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            return {"anyOf": _once(self._of(one) for one in get_args(kind))}
        if kind is type(None):
            return {"type": "null"}
        if origin is Literal:
            return _one_of(get_args(kind))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self._of(get_args(kind)[1])}
        if isinstance(origin, type) and issubclass(origin, tuple | Sequence | frozenset):
            return {"type": "array", "items": self._of(get_args(kind)[0])}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return _or_null(self._class(kind))
        if isinstance(kind, type) and issubclass(kind, Enum):
            return _one_of([member.value for member in kind])
        if kind is Any:
            return {}
        written = dict(_SCALARS[kind])
        return written if kind in _SELF_CONTAINED else {"anyOf": [written, _ENVIRONMENT]}

    def _class(self, cls: type[Any]) -> Schema:
        if cls not in self._names:
            taken = f"{cls.__module__.split('.')[-2]}-{cls.__name__}"
            self._names[cls] = taken if cls.__name__ in self._defs else cls.__name__
            self._defs[self._names[cls]] = {}
            self._defs[self._names[cls]] = self._object(cls, [item for item in dataclasses.fields(cls) if item.init])
        return {"$ref": f"#/$defs/{self._names[cls]}"}

    def _object(self, cls: Any, fields: Iterable[dataclasses.Field[Any]]) -> Schema:
        kinds = params.hints(cls)
        properties: dict[str, Schema] = {}
        required = []
        for item in fields:
            written = _bounded(self._of(kinds[item.name]), item.metadata.get("bounds", ()))
            if doc := item.metadata.get("doc"):
                written = {**written, "description": doc}
            if isinstance(item.default, bool | int | float | str) and item.default != "":
                written = {**written, "default": plain(item.default)}
            aliases = item.metadata.get("aliases", ())
            properties[yaml_key(item)] = written
            properties.update({alias: {**written, "deprecated": True} for alias in aliases})
            if item.default is item.default_factory is dataclasses.MISSING and not aliases:
                required.append(yaml_key(item))
        return {**_closed(properties), **({"required": required} if required else {})}


def _bounded(written: Schema, bounds: Sequence[float | None]) -> Schema:
    """Return the schema with the bounds of a number, in each of its forms."""
    if "anyOf" in written:
        return {**written, "anyOf": [_bounded(one, bounds) for one in written["anyOf"]]}
    kinds = written.get("type", ())
    if {"integer", "number"}.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
        return written
    given = {word: bound for word, bound in zip(_BOUNDS, bounds, strict=False) if bound is not None}
    return {**written, **given}


def _one_of(choices: Sequence[Any]) -> Schema:
    """Return the schema of a choice. A choice may be a text that YAML reads as a number."""
    numbers = [float(choice) for choice in choices if str(choice).replace(".", "", 1).isdecimal()]
    return {"anyOf": [{"enum": [*choices, *(int(one) if one.is_integer() else one for one in numbers)]}, _ENVIRONMENT]}


def _or_null(written: Schema) -> Schema:
    """Return the schema that also accepts null, for a mapping without content."""
    return {"anyOf": [written, {"type": "null"}]}


def _closed(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _once(written: Iterable[Schema]) -> list[Schema]:
    """Return the choices without repetitions and without nested choices."""
    found: list[Schema] = []
    for one in written:
        for choice in one["anyOf"] if set(one) == {"anyOf"} else [one]:
            if choice not in found:
                found.append(choice)
    return found
