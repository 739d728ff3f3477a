"""The `scheduling` section: an EndpointPickerConfig, read piece by piece so that one fault does not hide another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from proxy.core import params
from proxy.core.errors import Problem
from proxy.core.params import Invalid, join, param, suggestion
from proxy.scheduling.accepted import FLOW_CONTROL, accepted
from proxy.scheduling.sections import (
    FLOW_TYPES,
    NOTIFIED,
    PROGRAM_AWARE,
    SETTINGS_TYPES,
    DataLayer,
    DataLayerSection,
    FlowControlSection,
    Ref,
    RequestHandlerSection,
    settings,
)

__all__ = ["DataLayer", "Document", "PluginEntry", "PluginRef", "ProfileEntry", "read"]

T = TypeVar("T")

API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
KIND = "EndpointPickerConfig"
FEATURE_GATES = (FLOW_CONTROL, "haPopulateNonLeaderDatastore")
TOP_LEVEL = (
    "apiVersion",
    "kind",
    "featureGates",
    "plugins",
    "schedulingProfiles",
    "dataLayer",
    "flowControl",
    "requestHandler",
    "parser",
    "saturationDetector",
)


@dataclass(frozen=True, slots=True)
class PluginEntry:
    type: str = param(doc="plugin type")
    name: str = param("", "name of the instance; default: the type")
    parameters: Mapping[str, Any] | None = param(None, "parameters of the type")

    @property
    def label(self) -> str:
        return self.name or self.type


@dataclass(frozen=True, slots=True)
class PluginRef:
    plugin_ref: str = param(doc="name of a plugin")
    weight: float | None = param(None, "weight of a scorer; default: 1", at_least=0)


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    name: str
    plugins: tuple[PluginRef, ...]
    shadow: bool
    path: str


@dataclass(frozen=True, slots=True)
class ProfileShell:
    """A profile without its references, which are read one by one."""

    name: str = param(doc="name of the profile")
    plugins: Sequence[Any] = param((), "references to plugins")
    shadow: bool = param(
        False,
        "run the profile after the decision and report its choice without applying it",
        aliases=("shadow-profile",),
    )


@dataclass(frozen=True, slots=True)
class Document:
    """`plugins` are those for the registry; `names` are all names that may be referred to, faulty ones included.
    `profiles` is None where the document has none; `problems` are all faults that can be seen without the registry."""

    plugins: tuple[PluginEntry, ...] = ()
    profiles: tuple[ProfileEntry, ...] | None = None
    data_layer: DataLayer = field(default_factory=DataLayer)
    flow_control: Mapping[str, Any] = field(default_factory=dict)
    """Values of the section `flowControl` of kvlane's own configuration."""
    gates: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    remarks: tuple[Problem, ...] = ()
    """What is said in older words, or to no effect; it does not hinder."""
    path: str = ""
    given: bool = True


def read(data: Any, path: str = "") -> Document:
    """Never raises: what is wrong is in `problems`, their paths below `path`. None is no section at all."""
    return _Reader(path).read(data)


class _Reader:
    """Collects problems while it reads; lives as long as one `read`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._problems: list[Problem] = []
        self._names: dict[str, str] = {}
        self._profile_names: set[str] = set()

    def read(self, data: Any) -> Document:
        if not isinstance(data, Mapping):
            if data is not None:
                self._complain("", f"must be a mapping, not {type(data).__name__}")
            return Document(problems=tuple(self._problems), path=self._path, given=False)
        data, remarks = accepted(data)
        self._check_top_level(data)
        gates = self._gates(data.get("featureGates"))
        entries = [entry for index, item in self._items(data, "plugins") if (entry := self._plugin(index, item))]
        shells = [self._profile(index, item) for index, item in self._items(data, "schedulingProfiles")]
        return Document(
            plugins=tuple(entry for entry in entries if entry.type not in (*SETTINGS_TYPES, *FLOW_TYPES)),
            profiles=tuple(shell for shell in shells if shell) if shells else None,
            data_layer=self._data_layer(data, [entry for entry in entries if entry.type in SETTINGS_TYPES]),
            flow_control=self._flow_control(data, [entry for entry in entries if entry.type in FLOW_TYPES], gates),
            gates=gates,
            names=self._names,
            problems=tuple(self._problems),
            remarks=tuple(Problem(join(self._path, remark.path), remark.message) for remark in remarks),
            path=self._path,
        )

    def _check_top_level(self, data: Mapping[Any, Any]) -> None:
        for key in data:
            if key not in TOP_LEVEL:
                self._complain("", f"unknown field '{key}'{suggestion(str(key), TOP_LEVEL)}")
        if data.get("apiVersion", API_VERSIONS[0]) not in API_VERSIONS:
            self._complain("apiVersion", f"{data['apiVersion']!r} is none of {', '.join(API_VERSIONS)}")
        if data.get("kind", KIND) != KIND:
            self._complain("kind", f"must be {KIND}, not {data['kind']!r}")

    def _gates(self, data: Any) -> dict[str, bool]:
        gates = {}
        for index, gate in enumerate(self._load_list(data, "featureGates")):
            name, equals, value = str(gate).partition("=")
            if name not in FEATURE_GATES:
                known = suggestion(name, FEATURE_GATES)
                self._complain(f"featureGates[{index}]", f"unknown feature gate '{name}'{known}")
            elif equals and value not in ("true", "false"):
                self._complain(f"featureGates[{index}]", f"'{name}' must be true or false, not '{value}'")
            gates[name] = value != "false"
        return gates

    def _plugin(self, index: int, item: Any) -> PluginEntry | None:
        """None if it is faulty or of another issue; its name is known all the same."""
        label = _text(item, "name") or _text(item, "type")
        path = f"plugins.{label}" if label else f"plugins[{index}]"
        if label in self._names:
            self._complain(path, "two plugins have this name")
        elif label:
            self._names[label] = _text(item, "type")
        entry = self._load(PluginEntry, item, path)
        if entry is None or entry.type not in (LATER_TYPES | REMOVED_TYPES.keys()):
            return entry
        self._complain(path, f"'{entry.type}' {REMOVED_TYPES.get(entry.type, NOT_YET)}")
        return None

    def _profile(self, index: int, item: Any) -> ProfileEntry | None:
        name = _text(item, "name")
        path = f"schedulingProfiles.{name}" if name else f"schedulingProfiles[{index}]"
        if name and name in self._profile_names:
            self._complain(path, "two profiles have this name")
        self._profile_names.add(name)
        shell = self._load(ProfileShell, item, path)
        refs = self._refs(item, path)
        return ProfileEntry(shell.name, refs, shell.shadow, join(self._path, path)) if shell else None

    def _refs(self, profile: Any, path: str) -> tuple[PluginRef, ...]:
        """Those to plugins; parsers and sources of metrics have no part in a profile, and do no harm there."""
        refs = []
        for at, item in enumerate(_sequence(profile, "plugins")):
            ref = self._load(PluginRef, item, f"{path}.plugins[{at}]")
            where = f"{path}.plugins[{at}].pluginRef"
            if ref is None or not self._check_ref(ref.plugin_ref, where):
                continue
            if self._names[ref.plugin_ref] in FLOW_TYPES:
                self._complain(where, f"'{ref.plugin_ref}' is no filter, scorer or picker")
            elif self._names[ref.plugin_ref] not in SETTINGS_TYPES:
                refs.append(ref)
        return tuple(refs)

    def _data_layer(self, data: Mapping[Any, Any], entries: Sequence[PluginEntry]) -> DataLayer:
        section = self._load(DataLayerSection, data.get("dataLayer"), "dataLayer") or DataLayerSection()
        self._check_data_layer(section)
        fields: dict[str, Any] = {}
        for entry in entries:
            kind = SETTINGS_TYPES[entry.type]
            loaded = self._load(kind.parameters, entry.parameters, f"plugins.{entry.label}")
            if kind.field in fields:
                self._complain(f"plugins.{entry.label}", f"there is another '{entry.type}'; one is enough")
            elif kind.field:
                fields[kind.field] = loaded
        return DataLayer(parsers=self._parsers(data), inject_defaults=section.inject_defaults, **fields)

    def _check_data_layer(self, section: DataLayerSection) -> None:
        for key in ("peer_discovery", "cross_replica_syncer_plugin_ref", "cross_replica_sync_interval"):
            if getattr(section, key) is not None:
                self._complain(f"dataLayer.{params.camel(key)}", NOT_YET)
        for index, source in enumerate(section.sources):
            path = f"dataLayer.sources[{index}]"
            self._check_role(source.plugin_ref, f"{path}.pluginRef", "data source")
            for at, extractor in enumerate(source.extractors):
                self._check_role(extractor.plugin_ref, f"{path}.extractors[{at}].pluginRef", "extractor")
        if section.discovery is not None:
            self._check_role(section.discovery.plugin_ref, "dataLayer.discovery.pluginRef", "discovery")

    def _flow_control(
        self, data: Mapping[Any, Any], entries: Sequence[PluginEntry], gates: Mapping[str, bool]
    ) -> Mapping[str, Any]:
        given, old, is_on = (
            data.get("flowControl") or {},
            data.get("saturationDetector"),
            gates.get(FLOW_CONTROL, False),
        )
        if old and isinstance(given, Mapping):
            given = {"saturationDetector": old, **given}
        section = self._load(FlowControlSection, given, "flowControl")
        for entry in [entry for entry in entries if entry.type == PROGRAM_AWARE][1:]:
            self._complain(f"plugins.{entry.label}", f"there is another '{PROGRAM_AWARE}'; one is enough")
        named = {}
        for entry in entries:
            parameters = self._load(FLOW_TYPES[entry.type].parameters, entry.parameters, f"plugins.{entry.label}")
            if parameters is not None:
                named[entry.label] = (entry.type, parameters)
        refs = section.refs() if section is not None else ()
        wrong = [ref for at, ref, role in refs if not self._is_flow(ref, f"flowControl.{at}", role)]
        if section is None or wrong or len(named) < len(entries):
            return {}
        return settings(section, named, is_on)

    def _is_flow(self, name: str | None, path: str, role: str) -> bool:
        if name is None:
            return True
        kind = FLOW_TYPES.get(self._names.get(name, ""))
        if not self._check_ref(name, path):
            return False
        if kind is None or kind.role != role:
            self._complain(path, f"'{name}' is no {role}")
            return False
        return True

    def _parsers(self, data: Mapping[Any, Any]) -> tuple[str, ...]:
        section = self._load(RequestHandlerSection, data.get("requestHandler"), "requestHandler")
        named = [(f"requestHandler.parsers[{at}]", ref) for at, ref in enumerate(section.parsers if section else ())]
        if data.get("parser") is not None and (old := self._load(Ref, data["parser"], "parser")):
            named.append(("parser", old))
        for path, ref in named:
            self._check_role(ref.plugin_ref, f"{path}.pluginRef", "parser")
        return tuple(self._names.get(ref.plugin_ref, "") for _, ref in named)

    def _check_role(self, name: str, path: str, role: str) -> None:
        type_name = self._names.get(name, "")
        if self._check_ref(name, path) and type_name not in (LATER_TYPES | REMOVED_TYPES.keys()):
            kind = SETTINGS_TYPES.get(type_name)
            if role == "extractor" and type_name in NOTIFIED:
                return
            if kind is None or kind.role != role:
                self._complain(path, f"'{name}' is no {role}")

    def _check_ref(self, name: str, path: str) -> bool:
        if name in self._names:
            return True
        self._complain(path, f"no plugin is named '{name}'{suggestion(name, list(self._names))}")
        return False

    def _items(self, data: Mapping[Any, Any], key: str) -> Iterator[tuple[int, Any]]:
        return enumerate(self._load_list(data.get(key), key))

    def _load_list(self, data: Any, path: str) -> Sequence[Any]:
        if data is None or (isinstance(data, Sequence) and not isinstance(data, str)):
            return data or ()
        self._complain(path, f"must be a list, not {type(data).__name__}")
        return ()

    def _load(self, cls: type[T], data: Any, path: str) -> T | None:
        try:
            return params.build(cls, data, join(self._path, path))
        except Invalid as invalid:
            self._problems.extend(invalid.problems)
            return None

    def _complain(self, path: str, message: str) -> None:
        where = join(self._path, path) if path else self._path
        self._problems.append(Problem(where, message))


def _text(item: Any, key: str) -> str:
    value = item.get(key) if isinstance(item, Mapping) else None
    return value if isinstance(value, str) else ""


def _sequence(item: Any, key: str) -> Sequence[Any]:
    value = item.get(key) if isinstance(item, Mapping) else None
    return value if isinstance(value, list | tuple) else ()


NOT_YET = "is not yet supported"

LATER_TYPES = frozenset(
    {
        "by-label",
        "cross-replica-publisher",
        "disaggregatedset-rollout-pod-extractor",
        "disaggregatedset-rollout-screener",
        "local-syncer",
        "multicluster-approx-prefix-cache-producer",
        "multicluster-file-discovery",
        "multicluster-kv-cache-utilization-scorer",
        "multicluster-metrics-data-source",
        "multicluster-metrics-extractor",
        "multicluster-prefix-cache-scorer",
        "multicluster-queue-scorer",
        "multicluster-session-affinity-filter",
        "p2p-source-producer",
        "vertexai-parser",
        "vllmgrpc-parser",
    }
)

REMOVED_TYPES = {
    "decision-tree-filter": "no longer exists; list the filters one after the other in a profile",
    "least-kv-cache-filter": "no longer exists; use kv-cache-utilization-scorer",
    "least-queue-filter": "no longer exists; use queue-scorer",
    "lora-affinity-filter": "no longer exists; use lora-affinity-scorer",
    "low-queue-filter": "no longer exists; use queue-scorer, or utilization-filter with "
    "'conditions: [{metric: waiting-queue, maxValue: 128}]'",
}
"""Plugin types of earlier releases of the Gateway API inference scheduler, and what replaces each."""
