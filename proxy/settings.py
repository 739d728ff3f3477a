"""The root of the configuration: one YAML file, every fault reported with its path, every value with its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from proxy import pool_settings, yaml_source
from proxy.autoscale import settings as policies
from proxy.autoscale.settings import AutoscaleSettings
from proxy.cluster.settings import ReplicaSettings
from proxy.core import params
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Invalid, plain, suggestion, yaml_key
from proxy.core.tls import PodTls
from proxy.disagg.settings import DisaggregationSettings
from proxy.extproc.settings import ExtProcSettings
from proxy.fleet.dialects import Engines
from proxy.fleet.settings import PodSources
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.http.settings import Admin, Listen, Security
from proxy.models.settings import ModelSettings
from proxy.pool_settings import PoolSettings
from proxy.reliability.settings import ReliabilitySettings
from proxy.scheduling.document import KIND, Document
from proxy.telemetry.settings import Telemetry

DERIVED = ("scheduling", "pools", "engines", "given", "source")
"""Fields that are no sections of plain values."""

EVERYWHERE = {"0.0.0.0", "::"}
"""Hosts that are all addresses of the machine."""

ANOTHER_FILE = (
    "the admin port accepts a file that is not in effect only where it asks for a key: set admin.apiKey,"
    " or name the file in the configuration file"
)
"""Why a configuration may not name a file: an error message, or a service that gets a token, could show its content."""

_DOCUMENT_KEYS = ("plugins", "schedulingProfiles")


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration. `scheduling` is the document of that section, `engines` the dialects it knows; `pools`
    are those beside the one of the top level; `given` is what was written, to tell it from defaults, and `source` all
    that `from_mapping` made this of."""

    listen: Listen = field(default_factory=Listen)
    admin: Admin = field(default_factory=Admin)
    pods: PodSources = field(default_factory=PodSources)
    scheduling: Document = field(default_factory=lambda: Document(given=False))
    flow_control: FlowControlSettings = field(default_factory=FlowControlSettings)
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    autoscale: AutoscaleSettings = field(default_factory=AutoscaleSettings)
    security: Security = field(default_factory=Security)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    extproc: ExtProcSettings = field(default_factory=ExtProcSettings)
    telemetry: Telemetry = field(default_factory=Telemetry)
    engines: Engines = field(default_factory=Engines)
    given: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def remarks(self) -> tuple[Problem, ...]:
        """What its documents say in older words, or to no effect."""
        return tuple(remark for pool in self.all_pools.values() for remark in pool.scheduling.remarks)

    @property
    def all_pools(self) -> dict[str, PoolSettings]:
        """By name; that of the top level is the first."""
        return {
            DEFAULT_POOL: PoolSettings(
                self.pods, self.flow_control, self.disaggregation, self.scheduling, self.engines
            ),
            **self.pools,
        }

    def alone(self, pool: str) -> Settings:
        """As if this pool were that of the top level, and the only one. Raises KeyError if there is none."""
        own = self.all_pools[pool]
        parts = {item.name: getattr(own, item.name) for item in dataclasses.fields(own) if item.name != "given"}
        return dataclasses.replace(self, **parts, pools={})

    @property
    def has_pods(self) -> bool:
        """Whether any pod can come of it."""
        return any(pool.pods.has_source for pool in self.all_pools.values())

    @property
    def pools_tls(self) -> dict[str, PodTls]:
        """How pods of the pools that say so are spoken to."""
        return {name: pool.pods.tls for name, pool in self.pools.items() if pool.pods.tls != PodTls()}


def load(path: Path, environ: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Kvlane's own file, or an EndpointPickerConfig; `overrides` are values of sections that win over the file's.
    Raises ConfigError."""
    return from_text(yaml_source.text_of(path), path, environ, overrides)


def from_text(
    text: str,
    path: Path,
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    reads_files: bool = True,
) -> Settings:
    """As `load`, from what stands in the file, or would. Unless it `reads_files`, a section in another file is a fault.
    Raises ConfigError."""
    data = yaml_source.read(text, str(path), environ)
    if not isinstance(data, Mapping):
        raise ConfigError([Problem(str(path), "must hold a mapping")])
    if data.get("kind") == KIND or any(key in data for key in _DOCUMENT_KEYS):
        data = {"scheduling": data}
    read = partial(_read, environ=environ) if reads_files else _refused
    return from_mapping(_with_scheduling_files(data, path, read), overrides)


def from_mapping(data: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """As `load`, from what the file would hold. Raises ConfigError with every fault."""
    data = _merged(data, overrides or {})
    problems: list[Problem] = []
    sections = {key: value for key, value in data.items() if key != "pools"}
    rest, own = pool_settings.parts(sections, "", problems)
    pools = pool_settings.read(data.get("pools"), data.get("disaggregation"), problems)
    own["autoscale"] = _policies(data.get(policies.PATH), problems)
    plain_ones = {key: value for key, value in rest.items() if key != policies.PATH}
    try:
        settings = params.build(Settings, plain_ones, "", {**own, "pools": pools, "given": rest, "source": data})
    except Invalid as invalid:
        raise ConfigError([*_with_all_known(invalid.problems), *problems]) from None
    problems.extend(pool_settings.taken(settings.all_pools))
    problems.extend(settings.models.astray(settings.all_pools))
    problems.extend(_unscaled(settings))
    problems.extend(_taken_twice(settings))
    if problems:
        raise ConfigError(problems)
    return settings


def effective(settings: Settings | PoolSettings) -> dict[str, Any]:
    """Every value of every section but `scheduling` and `pools` as `{"value": …, "origin": "file" | "default"}`."""
    sections = {yaml_key(item): item for item in dataclasses.fields(settings) if item.name not in DERIVED}
    return {key: _described(getattr(settings, item.name), settings.given.get(key)) for key, item in sections.items()}


def _read(path: Path, environ: Mapping[str, str]) -> Any:
    return yaml_source.read(yaml_source.text_of(path), str(path), environ)


def _refused(path: Path) -> Any:
    raise ConfigError([Problem(str(path), ANOTHER_FILE)])


def _with_scheduling_files(data: Mapping[str, Any], path: Path, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    """That of the top level, and those of the pools."""
    pools = data.get("pools")
    if isinstance(pools, Mapping):
        named = {
            name: _with_scheduling_file(pool, path, read, f"pools.{name}.scheduling") for name, pool in pools.items()
        }
        data = {**data, "pools": named}
    return _with_scheduling_file(data, path, read, "scheduling")  # type: ignore[no-any-return]


def _with_scheduling_file(data: Any, path: Path, read: Callable[[Path], Any], where: str) -> Any:
    section = data.get("scheduling") if isinstance(data, Mapping) else None
    if not isinstance(section, Mapping) or "file" not in section:
        return data
    if len(section) > 1:
        raise ConfigError([Problem(where, "has a file and keys of its own; keep one of them")])
    return {**data, "scheduling": read(path.parent / str(section["file"]))}


def _merged(data: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(data)
    for name, values in overrides.items():
        section = merged.get(name)
        merged[name] = {**section, **values} if isinstance(section, Mapping) else dict(values)
    return merged


def _policies(section: Any, problems: list[Problem]) -> AutoscaleSettings:
    """Faults that no single value shows are found beside those of single values."""
    try:
        return policies.load(section)
    except ConfigError as error:
        problems.extend(error.problems)
        return AutoscaleSettings()


def _unscaled(settings: Settings) -> list[Problem]:
    """A problem for every policy of a pool that is none."""
    pools = settings.all_pools
    return [
        Problem(f"{policies.PATH}.pools.{name}", f"there is no such pool{suggestion(name, list(pools))}")
        for name in settings.autoscale.pools
        if name not in pools
    ]


def _taken_twice(settings: Settings) -> list[Problem]:
    listen, admin = settings.listen, settings.admin
    hosts = {listen.host, admin.host}
    if not admin.port or admin.port != listen.port or (len(hosts) > 1 and not hosts & EVERYWHERE):
        return []
    return [Problem("admin.port", f"{admin.port} is the port of listen, too")]


def _with_all_known(problems: Sequence[Problem]) -> list[Problem]:
    """`scheduling` and `pools` are read apart, so the loader of the rest does not know that they exist."""
    known = [yaml_key(item) for item in dataclasses.fields(Settings) if item.name not in ("engines", "given", "source")]
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
