"""The root of the configuration: the sections of the top level and of each pool, and how they are read."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.autoscale import settings as policies
from proxy.autoscale.settings import AutoscaleSettings
from proxy.cluster.settings import ReplicaSettings
from proxy.config import picker_config
from proxy.core import params
from proxy.core.endpoint import DEFAULT_POOL, PodTls
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Invalid, join, plain, suggestion, unknown, yaml_key
from proxy.core.ports import Clock, KvEvents, Random, SystemClock, Tokenizers
from proxy.core.registry import Ports, Registry
from proxy.core.state import State
from proxy.disagg.settings import DisaggregationSettings
from proxy.extproc.settings import ExtProcSettings
from proxy.fleet.dialects import Dialects
from proxy.fleet.settings import PodSources
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.http.settings import AdminSettings, ListenSettings, SecuritySettings
from proxy.models.settings import ModelSettings
from proxy.prefix.kv_subscriptions import KvSubscriptions, watch_nothing
from proxy.prefix.tokens import TokenSource
from proxy.reliability.settings import ReliabilitySettings
from proxy.scheduling import document
from proxy.scheduling.build import faults
from proxy.scheduling.document import Document
from proxy.telemetry.settings import Telemetry

Faults = list[Problem]

_NAME = re.compile(r"[A-Za-z0-9._-]+")

_SECTIONS = ("pods", "scheduling", "flowControl", "disaggregation")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`scheduling` is the document of that section, `dialects` the dialects that it knows, `given` what was written."""

    pods: PodSources = field(default_factory=PodSources)
    flow_control: FlowControlSettings = field(default_factory=FlowControlSettings)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    scheduling: Document = field(default_factory=Document)
    dialects: Dialects = field(default_factory=Dialects)
    given: Mapping[str, Any] = field(default_factory=dict)


DERIVED = ("scheduling", "pools", "dialects", "given", "source")
"""Fields that are not sections of plain values."""

EVERYWHERE = {"0.0.0.0", "::"}
"""Hosts that stand for all addresses of the machine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration. `scheduling` is the document of that section, `dialects` the dialects that it knows;
    `pools` are those beside the one of the top level; `given` is what was written, to tell it from defaults, and
    `source` all that `from_mapping` made this of."""

    listen: ListenSettings = field(default_factory=ListenSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    pods: PodSources = field(default_factory=PodSources)
    scheduling: Document = field(default_factory=Document)
    flow_control: FlowControlSettings = field(default_factory=FlowControlSettings)
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    autoscale: AutoscaleSettings = field(default_factory=AutoscaleSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    extproc: ExtProcSettings = field(default_factory=ExtProcSettings)
    telemetry: Telemetry = field(default_factory=Telemetry)
    dialects: Dialects = field(default_factory=Dialects)
    given: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def remarks(self) -> tuple[Problem, ...]:
        """Remarks on deprecated or ineffective parts of EndpointPickerConfigs."""
        return tuple(remark for pool in self.all_pools.values() for remark in pool.scheduling.remarks)

    @property
    def all_pools(self) -> dict[str, PoolSettings]:
        """Return the pools by name; the pool of the top level is the first."""
        return {
            DEFAULT_POOL: PoolSettings(
                self.pods, self.flow_control, self.disaggregation, self.scheduling, self.dialects
            ),
            **self.pools,
        }

    def alone(self, pool: str) -> Settings:
        """Return the settings with this pool at the top level, as the only one. Raise KeyError if it does not exist."""
        own = self.all_pools[pool]
        parts = {item.name: getattr(own, item.name) for item in dataclasses.fields(own) if item.name != "given"}
        return dataclasses.replace(self, **parts, pools={})

    @property
    def has_pods(self) -> bool:
        """Return whether any source of pods is configured."""
        return any(pool.pods.has_source for pool in self.all_pools.values())

    @property
    def pools_tls(self) -> dict[str, PodTls]:
        """Return the TLS settings of pools that differ from the default."""
        return {name: pool.pods.tls for name, pool in self.pools.items() if pool.pods.tls != PodTls()}


def from_mapping(data: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """As `load`, from what the file would hold. Raises ConfigError with every fault."""
    data = dict(data)
    for name, values in (overrides or {}).items():
        section = data.get(name)
        data[name] = {**section, **values} if isinstance(section, Mapping) else dict(values)
    problems: Faults = []
    rest, own = _parts({key: value for key, value in data.items() if key != "pools"}, "", problems)
    own["pools"] = _pools(data.get("pools"), data.get("disaggregation"), problems)
    try:
        own["autoscale"] = policies.load(data.get(policies.PATH))
    except ConfigError as error:
        problems.extend(error.problems)
        own["autoscale"] = AutoscaleSettings()
    plain_ones = {key: value for key, value in rest.items() if key != policies.PATH}
    try:
        settings = params.build(Settings, plain_ones, "", {**own, "given": rest, "source": data})
    except Invalid as invalid:
        raise ConfigError([*_with_all_known(invalid.problems), *problems]) from None
    problems.extend(_contradictions(settings))
    if problems:
        raise ConfigError(problems)
    return settings


def effective(settings: Settings | PoolSettings) -> dict[str, Any]:
    """Return every value of every section except `scheduling` and `pools` as `{"value": …, "origin": …}`."""
    sections = {yaml_key(item): item for item in dataclasses.fields(settings) if item.name not in DERIVED}
    return {key: _described(getattr(settings, item.name), settings.given.get(key)) for key, item in sections.items()}


def _parts(section: Mapping[str, Any], path: str, problems: Faults) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the section without `scheduling`, with its parts about scraping and queues; and the built values."""
    scheduling = document.read(section.get("scheduling"), join(path, "scheduling"))
    # with the ports of the proxy, so that an unreadable model or a missing package is a fault like others
    clock, draft = SystemClock(), State().draft()
    kv_events, tokens = KvSubscriptions(DEFAULT_POOL, watch_nothing, draft), TokenSource(clock.wall, draft)
    ports: Ports = {Clock: clock, Random: random.Random(), KvEvents: kv_events, Tokenizers: tokens}
    problems.extend(faults(scheduling, Registry.discover(), ports))
    rest = {key: value for key, value in section.items() if key != "scheduling"}
    pods, layer = rest.get("pods") or {}, scheduling.data_layer
    own: Faults = []
    if isinstance(pods, Mapping):
        rest["pods"] = picker_config.pods_section(pods, layer, own)
    if given := scheduling.flow_control if rest.get("flowControl") else scheduling.default_flow_control:
        rest["flowControl"] = picker_config.flow_control_section(rest.get("flowControl"), given, own)
    dialects = picker_config.dialects(layer.core, own)
    problems.extend(Problem(join(path, problem.path), problem.message) for problem in own)
    return rest, {"scheduling": scheduling, "dialects": dialects}


def _pools(section: Any, disaggregation: Any, problems: Faults) -> dict[str, PoolSettings]:
    """Return the valid pools. They inherit the top-level `disaggregation`: most installations have one connector."""
    if not (section is None or isinstance(section, Mapping)):
        problems.append(Problem("pools", "must be a mapping of names to pools"))
        return {}
    pools = {}
    for name, pool in (section or {}).items():
        path = f"pools.{name}"
        if name == DEFAULT_POOL:
            problems.append(Problem(path, "the pods, scheduling and flowControl of this pool are at the top level"))
        elif not _NAME.fullmatch(str(name)):
            problems.append(Problem(path, "a name must consist of letters, digits, dots, dashes and underscores"))
        elif not (pool is None or isinstance(pool, Mapping)):
            problems.append(Problem(path, f"must be a mapping with {', '.join(_SECTIONS)}"))
        else:
            section = pool or {}
            own = section.get("disaggregation") or {}
            if disaggregation and isinstance(disaggregation, Mapping) and isinstance(own, Mapping):
                section = {**section, "disaggregation": {**disaggregation, **own}}
            rest, apart = _parts(section, path, problems)
            try:
                pools[str(name)] = params.build(PoolSettings, rest, path, {**apart, "given": section})
            except Invalid as invalid:
                problems.extend(invalid.problems)
    return pools


def _contradictions(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for every contradiction between sections."""
    pools, first = settings.all_pools, dict[tuple[str, str], str]()
    for name, pool in pools.items():
        place = join("" if name == DEFAULT_POOL else f"pools.{name}", "pods.static")
        for index, pod in enumerate(pool.pods.static):
            for key, value in (("name", pod.name), ("url", pod.url)):
                other = first.setdefault((key, value), name)
                if other != name:
                    yield Problem(f"{place}[{index}].{key}", f"'{value}' is used by the pool '{other}'")
    yield from settings.models.astray(pools)
    for name in settings.autoscale.pools:
        if name not in pools:
            yield Problem(f"{policies.PATH}.pools.{name}", f"there is no such pool{suggestion(name, list(pools))}")
    listen, admin = settings.listen, settings.admin
    share_a_host = listen.host == admin.host or bool({listen.host, admin.host} & EVERYWHERE)
    if admin.port and admin.port == listen.port and share_a_host:
        yield Problem("admin.port", f"{admin.port} is the port of listen, too")


def _with_all_known(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems with suggestions that include `scheduling` and `pools`, which the loader does not know."""
    hidden = ("dialects", "given", "source")
    known = [yaml_key(item) for item in dataclasses.fields(Settings) if item.name not in hidden]
    fixed = []
    for problem in problems:
        if not problem.path and problem.message.startswith("unknown field '"):
            word = problem.message.split("'")[1]
            problem = Problem("", unknown(word, known))
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
