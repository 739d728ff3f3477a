"""The root of the configuration: one YAML file, every fault reported with its path, every value with its origin."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy import picker_config, yaml_source
from proxy.core import params
from proxy.core.clock import SystemClock
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Invalid, plain, suggestion, yaml_key
from proxy.core.ports import Clock, Random
from proxy.core.registry import Registry
from proxy.fleet.dialects import Engines
from proxy.fleet.settings import FleetSettings
from proxy.http.settings import Admin, Listen, Security
from proxy.reliability.settings import ReliabilitySettings
from proxy.scheduling import document
from proxy.scheduling.build import faults
from proxy.scheduling.document import KIND, Document
from proxy.telemetry.settings import Telemetry

NOT_YET = ("models", "flowControl", "disaggregation", "autoscale", "replicas", "pools")
"""Sections that nothing stands behind so far."""

DERIVED = ("scheduling", "engines", "given")
"""Fields that are no sections of plain values."""

_DOCUMENT_KEYS = ("plugins", "schedulingProfiles")


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration. `scheduling` is the document of that section, `engines` the dialects it knows; `given`
    is what was written, to tell it from defaults."""

    listen: Listen = field(default_factory=Listen)
    admin: Admin = field(default_factory=Admin)
    pods: FleetSettings = field(default_factory=FleetSettings)
    scheduling: Document = field(default_factory=lambda: Document(given=False))
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    security: Security = field(default_factory=Security)
    telemetry: Telemetry = field(default_factory=Telemetry)
    engines: Engines = field(default_factory=Engines)
    given: Mapping[str, Any] = field(default_factory=dict)


def load(path: Path, environ: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Kvlane's own file, or an EndpointPickerConfig; `overrides` are values of sections that win over the file's.
    Raises ConfigError."""
    data = _read(path, environ)
    if not isinstance(data, Mapping):
        raise ConfigError([Problem(str(path), "the file must hold a mapping")])
    if data.get("kind") == KIND or any(key in data for key in _DOCUMENT_KEYS):
        data = {"scheduling": data}
    return from_mapping(_with_scheduling_file(data, path, environ), overrides)


def from_mapping(data: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """As `load`, from what the file would hold. Raises ConfigError with every fault."""
    data = _merged(data, overrides or {})
    problems = [Problem(name, "is not yet supported; take this section out") for name in NOT_YET if name in data]
    scheduling = document.read(data.get("scheduling"), "scheduling")
    problems.extend(faults(scheduling, Registry.discover(), {Clock: SystemClock(), Random: random.Random()}))
    rest = {key: value for key, value in data.items() if key not in (*NOT_YET, "scheduling")}
    pods, layer = rest.get("pods") or {}, scheduling.data_layer
    if isinstance(pods, Mapping):
        rest["pods"] = picker_config.pods_section(pods, layer, problems)
    apart = {"scheduling": scheduling, "engines": picker_config.engines(layer.core, problems), "given": rest}
    try:
        settings = params.build(Settings, rest, "", apart)
    except Invalid as invalid:
        raise ConfigError([*_with_scheduling_known(invalid.problems), *problems]) from None
    if problems:
        raise ConfigError(problems)
    return settings


def effective(settings: Settings) -> dict[str, Any]:
    """Every value of every section but `scheduling` as `{"value": …, "origin": "file" | "default"}`."""
    sections = [item for item in dataclasses.fields(settings) if item.name not in DERIVED]
    return {item.name: _described(getattr(settings, item.name), settings.given.get(item.name)) for item in sections}


def _read(path: Path, environ: Mapping[str, str]) -> Any:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from None
    return yaml_source.read(text, str(path), environ)


def _with_scheduling_file(data: Mapping[str, Any], path: Path, environ: Mapping[str, str]) -> Mapping[str, Any]:
    section = data.get("scheduling")
    if not isinstance(section, Mapping) or "file" not in section:
        return data
    if len(section) > 1:
        raise ConfigError([Problem("scheduling", "has a file and keys of its own; keep one of them")])
    return {**data, "scheduling": _read(path.parent / str(section["file"]), environ)}


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(data)
    for name, values in overrides.items():
        section = merged.get(name)
        merged[name] = {**section, **values} if isinstance(section, Mapping) else dict(values)
    return merged


def _with_scheduling_known(problems: Sequence[Problem]) -> list[Problem]:
    """`scheduling` is read apart, so the loader of the rest does not know that it exists."""
    known = [yaml_key(item) for item in dataclasses.fields(Settings) if item.name not in ("engines", "given")]
    fixed = []
    for problem in problems:
        if not problem.path and problem.message.startswith("unknown field '"):
            word = problem.message.split("'")[1]
            fixed.append(Problem("", f"unknown field '{word}'{suggestion(word, known)}"))
        else:
            fixed.append(problem)
    return fixed


def _described(value: Any, given: Any) -> Any:
    if dataclasses.is_dataclass(value):
        written = given if isinstance(given, Mapping) else {}
        return {
            yaml_key(item): _described(getattr(value, item.name), written.get(yaml_key(item), _MISSING))
            for item in dataclasses.fields(value)
        }
    return {"value": plain(value), "origin": "default" if given is _MISSING else "file"}


_MISSING = object()
